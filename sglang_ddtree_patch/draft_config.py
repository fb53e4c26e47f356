"""The draft model's config, read before any model loads: is it a DFlash drafter, and one for this target?"""

from __future__ import annotations

import json
from typing import Any

from sglang.srt.speculative.dflash_utils import parse_dflash_draft_config
from sglang.srt.utils.hf_transformers.config import get_config
from transformers import PretrainedConfig

from sglang_ddtree_patch.errors import ConfigurationError
from sglang_ddtree_patch.settings import ALGORITHM, DEFAULT_DRAFT_BLOCK, DRAFT_ARCHITECTURES


def trained_block_size(cfg: Any) -> int:
    """The block size in the draft model's config, after making sure that it is a DFlash drafter."""
    path = cfg.speculative_draft_model_path
    try:
        config = get_config(
            path,
            trust_remote_code=cfg.trust_remote_code,
            revision=cfg.speculative_draft_model_revision,
            model_override_args=json.loads(cfg.json_model_override_args),
        )
    except (LookupError, OSError, TypeError, ValueError) as error:
        raise ConfigurationError(
            f"--speculative-draft-model-path {path}: no model config could be read there "
            f"({_first_line(error)}). Give the folder or Hugging Face name of a DFlash drafter."
        ) from error
    architectures = config.architectures or []
    if not DRAFT_ARCHITECTURES.intersection(architectures):
        raise ConfigurationError(
            f"--speculative-draft-model-path {path} is not a plain DFlash drafter: its config names "
            f"{architectures or 'no architecture'}, and {ALGORITHM} drafts with one of "
            f"{sorted(DRAFT_ARCHITECTURES)}."
        )
    try:
        draft = parse_dflash_draft_config(draft_hf_config=config)
    except (TypeError, ValueError) as error:
        raise ConfigurationError(
            f"--speculative-draft-model-path {path}: its config is not one of a DFlash drafter "
            f"({_first_line(error)}). Correct config.json there, or give another drafter."
        ) from error
    if draft.is_domino or draft.selector_rank:
        raise ConfigurationError(
            f"--speculative-draft-model-path {path} carries a Domino or selector head, which proposes "
            f"one chain: {ALGORITHM} needs a plain DFlash drafter, or serve it with DFLASH."
        )
    return draft.resolve_block_size(default=DEFAULT_DRAFT_BLOCK)


def check_vocabulary(cfg: Any, target: int) -> None:
    """Refuse a drafter trained for other tokens than the target's, if its config says so.

    It would serve, as it drafts with the target's embedding and head, but its guesses would mean nothing.

    Args:
        cfg: the server arguments.
        target: tokens of the target's vocabulary.

    Raises:
        ConfigurationError: the vocabularies differ.
    """
    path = cfg.speculative_draft_model_path
    try:
        # The file itself: a config class fills in a vocabulary where none is named. `trained_block_size` has
        # had it fetched, so that no hub is asked a second time.
        named, _ = PretrainedConfig.get_config_dict(
            path, revision=cfg.speculative_draft_model_revision, local_files_only=True
        )
    except OSError:  # SGLang fetched it from elsewhere, an object store for one
        return
    if named.get("vocab_size", target) != target:
        raise ConfigurationError(
            f"--speculative-draft-model-path {path} was trained for a vocabulary of {named['vocab_size']} "
            f"tokens, and the target has {target}: give a drafter trained for this target."
        )


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
