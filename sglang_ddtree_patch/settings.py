"""Names and settings of DDTREE that SGLang's own flags do not carry."""

from __future__ import annotations

import os
import re

from sglang_ddtree_patch.errors import ConfigurationError

ALGORITHM = "DDTREE"
BACKEND = "ddtree-verify"

DEFAULT_WIDTH = 16
MAX_WIDTH = 256

# Architectures of plain DFlash drafters, and the sizes of their block, root included.
DRAFT_ARCHITECTURES = frozenset({"DFlashDraftModel", "DFlashLagunaForCausalLM", "MuseGlimmerAssistantModel"})
DEFAULT_DRAFT_BLOCK = 16
MAX_DRAFT_BLOCK = 32

# Candidates a position, from the environment because every process of a server inherits it and SGLang
# has no flag for it: --speculative-eagle-topk also changes how KV slots are counted.
CANDIDATES_VARIABLE = "SGLANG_DDTREE_TOPK"
DEFAULT_CANDIDATES = 8
MAX_CANDIDATES = 64

# Implementations of tree attention, and what forces one, for comparisons.
KERNEL_VARIABLE = "SGLANG_DDTREE_KERNEL"
REFERENCE = "reference"  # plain PyTorch, any device; reads lengths on the host, so it runs outside graphs
TRITON = "triton"  # our split-key kernels: NVIDIA GPUs from sm_80, or Triton's interpreter
HOPPER = "hopper"  # the same in Gluon, for sm_90 alone
MLA_NARROW = "mla-narrow"  # MLA on sm_90 in CUDA C++, made for few rows; only where it is asked for
FA3 = "fa3"  # FlashAttention 3 on the prefix, tree and merge ours
FLASHMLA = "flashmla"  # FlashMLA on the prefix, tree and merge ours
AUTO = "auto"
KERNELS = (TRITON, HOPPER, MLA_NARROW, FA3, FLASHMLA, REFERENCE)

# How wide the tree of a round is: always --speculative-num-draft-tokens, or at most that.
WIDTHS_VARIABLE = "SGLANG_DDTREE_WIDTHS"
FIXED = "fixed"
WIDTH_CHOICES = (FIXED, AUTO)

# Stands for "no seed" among the seeds of a batch, so no request may bring it.
UNSEEDED = -(2**63)


def candidates_per_position() -> int:
    """The drafter's candidates a position (top-k), from ``SGLANG_DDTREE_TOPK``.

    Raises:
        ConfigurationError: not an integer from 1 to ``MAX_CANDIDATES``.
    """
    text = os.environ.get(CANDIDATES_VARIABLE, str(DEFAULT_CANDIDATES))
    # At most as many digits as Python converts, and none of other scripts, which int() takes too.
    if not re.fullmatch(r"[0-9]{1,9}", text.strip()) or not 1 <= int(text) <= MAX_CANDIDATES:
        raise ConfigurationError(
            f"{CANDIDATES_VARIABLE}={text!r} is not a number of candidates a position: "
            f"set it to an integer from 1 to {MAX_CANDIDATES}, or unset it for {DEFAULT_CANDIDATES}."
        )
    return int(text)


def widths_are_chosen() -> bool:
    """Whether each round chooses its width, from ``SGLANG_DDTREE_WIDTHS``.

    Raises:
        ConfigurationError: neither of ``WIDTH_CHOICES``.
    """
    text = os.environ.get(WIDTHS_VARIABLE, FIXED)
    if text not in WIDTH_CHOICES:
        raise ConfigurationError(
            f"{WIDTHS_VARIABLE}={text!r} is no way to set the width of a tree: set it to {FIXED} (always "
            f"--speculative-num-draft-tokens) or {AUTO} (at most that, chosen for each round)."
        )
    return text == AUTO
