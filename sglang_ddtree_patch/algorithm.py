"""The `DDTREE` speculative algorithm as SGLang's registry sees it.

About forty branches of SGLang ask an algorithm `is_dflash()` or `is_dflash_family()` (sizing of the draft
pool, capture of auxiliary hidden states, prefill graphs); answering yes inherits what DFLASH needs of
them, because the drafter is the same.
"""

from __future__ import annotations

from typing import Any

from sglang.srt.arg_groups.overrides import resolving_view
from sglang.srt.runtime_context import get_spec
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
from sglang.srt.speculative.spec_registry import CustomSpecAlgo


class DDTreeAlgorithm(CustomSpecAlgo):
    """Answers of DDTREE where they differ from a bare plugin algorithm's."""

    def is_dflash(self) -> bool:
        return True

    def is_dflash_family(self) -> bool:
        return True

    def supports_target_verify_for_draft(self) -> bool:
        return True

    def supports_prefill_shared_read_done(self) -> bool:
        return True

    def supports_grammar_overlap(self) -> bool:
        """The round itself walks the grammars over the last one's tokens (sampling/grammar_tree.py)."""
        return True

    # The scheduler calls the next three on every algorithm, and `CustomSpecAlgo` lacks them.

    def create_future_map(self, *args: Any, **kwargs: Any) -> Any:
        return SpeculativeAlgorithm.create_future_map(self, *args, **kwargs)

    def need_topk(self) -> bool:
        return False

    def carries_draft_hidden_states(self) -> bool:
        return False

    def get_num_tokens_per_req_for_target_verify(self, num_draft_tokens: int, is_draft_worker: bool) -> int:
        """Rows a request: the tree's width for the target, the drafter's block for the draft model."""
        return get_spec().speculative_dflash_block_size if is_draft_worker else num_draft_tokens

    def resolve_max_speculative_num_draft_tokens(self, server_args: Any) -> int | None:
        """KV slots a round may write for a request, which SGLang reserves and counts."""
        cfg = resolving_view(server_args)
        if cfg.speculative_num_draft_tokens is None:
            return None
        return max(int(cfg.speculative_num_draft_tokens), int(cfg.speculative_dflash_block_size or 0))
