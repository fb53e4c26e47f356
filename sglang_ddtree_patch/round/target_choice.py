"""The target's choice: the token it puts after every row of the block, by its own rule.

Lossless sampling needs nothing more. Each row draws one token, independently of the other rows and of the
tree, exactly as plain decoding would after the same prefix; the walk (kernels/accept/walk.py) then goes on
for as long as a child holds the token drawn. So whatever the tree offers, the text is distributed as the
target's own, and the drafter decides only how many tokens a round commits.

The rule is SGLang's own sampler, asked for ``batch * width`` rows instead of ``batch``.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import torch
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo
from sglang.srt.utils.async_probe import sanitize_nan_logits

from sglang_ddtree_patch.kernels.penalties import Penalties, penalize_rows
from sglang_ddtree_patch.kernels.tree.build import TokenTree


def adjust_logits(
    logits: torch.Tensor,
    sampling_info: SamplingBatchInfo,
    tree: TokenTree,
    penalties: Penalties | None,
    grammar_mask: Any,
    longest: int,
) -> None:
    """What SGLang does to logits before it samples, in its order, on every branch and in place.

    Args:
        logits: [batch * width, vocabulary].
        sampling_info: one entry a request.
        tree: the block.
        penalties: of the batch, through the roots.
        grammar_mask: which tokens may follow each row (SGLang's GrammarMask), or None.
        longest: depth that no row exceeds.
    """
    if penalties is not None:
        penalize_rows(logits, tree, penalties, longest)
    if grammar_mask is not None:
        grammar_mask.apply(logits)
    if sampling_info.logit_bias is not None:
        logits.view(-1, tree.width, logits.shape[1]).add_(sampling_info.logit_bias[:, None])


def choose_tokens(
    sampler: Any,
    logits_output: LogitsProcessorOutput,
    sampling_info: SamplingBatchInfo,
    tree: TokenTree,
    prefix_lens: torch.Tensor,
    keep_logits: bool,
) -> torch.Tensor:
    """The target's token after every row. No device value is read on the host.

    Args:
        sampler: the target's sampler (SGLang's Sampler).
        logits_output: its ``next_token_logits`` [batch * width, vocabulary] are adjusted already.
        sampling_info: one entry a request.
        tree: the block.
        prefix_lens: [batch] position of each root.
        keep_logits: whether the logits are read again; if not, sampling reuses their memory.

    Returns:
        [batch * width] int64.
    """
    logits = logits_output.next_token_logits
    # As the sampler does: SGLANG_SANITIZE_NAN_LOGITS and SGLANG_ENABLE_NAN_LOGITS_CHECK say what NaN means.
    sanitize_nan_logits(logits, "DDTREE verify: target logits")
    if sampling_info.is_all_greedy:
        return logits.argmax(-1)
    rows = by_row(sampling_info, tree.width)
    # A greedy request's tokens must not depend on who shares its batch, and a tie that argmax breaks one
    # way sampling with top-k 1 may break another.
    greedy = logits.argmax(-1) if sampling_info.is_any_greedy else None
    drawn = sampler(
        dataclasses.replace(logits_output, next_token_logits=logits.clone() if keep_logits else logits),
        rows,
        False,
        [],
        [],
        (prefix_lens[:, None] + tree.depths).flatten(),
    ).to(torch.int64)
    return drawn if greedy is None else torch.where(rows.top_ks <= 1, greedy, drawn)


def by_row(sampling_info: SamplingBatchInfo, width: int) -> SamplingBatchInfo:
    """A batch's sampling parameters with one entry a tree row; what was applied to the logits is left out."""
    seeds = sampling_info.sampling_seed
    return dataclasses.replace(
        sampling_info,
        temperatures=_repeated(sampling_info.temperatures, width),
        top_ps=_repeated(sampling_info.top_ps, width),
        top_ks=_repeated(sampling_info.top_ks, width),
        min_ps=_repeated(sampling_info.min_ps, width),
        sampling_seed=None if seeds is None else seeds.repeat_interleave(width),
        logit_bias=None,
        has_custom_logit_processor=False,
        grammars=None,
        penalizer_orchestrator=None,
        acc_additive_penalties=None,
        acc_scaling_penalties=None,
    )


@functools.lru_cache(maxsize=32)
def _repeated(values: torch.Tensor, width: int) -> torch.Tensor:
    """Each entry ``width`` times; a batch keeps its tensors for many rounds, and nobody writes to them."""
    return values.repeat_interleave(width, 0)
