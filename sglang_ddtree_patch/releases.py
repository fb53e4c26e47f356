"""The SGLang releases that DDTREE serves on, and all that differs between them.

contract.py is written for the newest. An older release is that table with a few entries exchanged or left
out, and here is also what the round does where it meets one of them, so that no other module asks which
release it runs on. contract_check.py finds the release whose table the installed sources fulfil.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from sglang_ddtree_patch.contract import CONTRACT, SUPPORTED_VERSION, Attribute

if TYPE_CHECKING:  # the `ddtree` command reads this table where torch is not installed
    import torch


@dataclass(frozen=True)
class Release:
    """One SGLang release: what it must fulfil, and its answers where releases differ."""

    version: str
    contract: tuple[Attribute, ...]
    draft_layout_attribute: str  # of the DFLASH worker; what `draft_tp_context` takes
    defers_verify_gather: bool  # a rank may return its own part of the vocabulary from verify
    defers_verify_planning: bool  # a verify may be planned as it runs, not before
    has_block_verification: bool  # --speculative-use-block-verification is a flag

    def draft_layout(self, worker: Any) -> Any:
        """The place of the drafter among the ranks, as `draft_tp_context` takes it."""
        return getattr(worker, self.draft_layout_attribute)

    def whole_logits(self, worker: Any, logits: torch.Tensor) -> torch.Tensor:
        """Verify's logits over the whole vocabulary, whatever part of it each rank returned."""
        gather = worker._target_logits_processor if self.defers_verify_gather else None
        if gather is None or not gather.is_deferred_shard(logits):
            return logits
        return gather.finish_deferred_gather(logits)

    def verify(self, verify_input: Any, batch: Any, target_worker: Any) -> Any:
        """SGLang's result of the target's forward over ``verify_input`` (DFlashVerifyInput).

        Planned as it runs, its tokens and positions are copied into the CUDA graph's buffers once, not twice.
        """
        how = {"defer_metadata_init": True} if self.defers_verify_planning else {}
        forward_batch, _ = verify_input.prepare_for_verify(batch, target_worker, **how)
        return target_worker.forward_batch_generation(
            batch=None,
            forward_batch=forward_batch,
            is_verify=True,
            skip_attn_backend_init=None if self.defers_verify_planning else True,
        )

    def verifies_blocks(self, cfg: Any) -> bool:
        """Whether the server arguments ask for block verification."""
        return self.has_block_verification and cfg.speculative_use_block_verification


def _exchanged(changes: Mapping[str, Attribute | None]) -> tuple[Attribute, ...]:
    """The newest contract with some entries exchanged, or left out where the change is None."""
    after = [changes.get(attribute.path, attribute) for attribute in CONTRACT]
    return tuple(attribute for attribute in after if attribute is not None)


def _entry(path: str) -> Attribute:
    (found,) = [attribute for attribute in CONTRACT if attribute.path == path]
    return found


def _without_parameter(path: str, parameter: str) -> dict[str, Attribute]:
    entry = _entry(path)
    assert entry.parameters is not None, f"{path} is no function"
    return {path: replace(entry, parameters=tuple(p for p in entry.parameters if p != parameter))}


def _contract_0_5_22() -> tuple[Attribute, ...]:
    worker = "sglang.srt.speculative.dflash_worker_v2.DFlashWorkerV2"
    layout = _entry(f"{worker}.draft_parallel_layout")
    draft_scope = _entry("sglang.srt.speculative.spec_utils.draft_tp_context")
    arguments = _entry("sglang.srt.arg_groups.field_order.POSITIONAL_FIELD_ORDER")
    block_verification = "speculative_use_block_verification"
    return _exchanged(
        {
            layout.path: replace(layout, name="DFlashWorkerV2.draft_owns_attention"),
            draft_scope.path: replace(draft_scope, parameters=("owns_attention",)),
            arguments.path: replace(
                arguments, members=tuple(name for name in arguments.members if name != block_verification)
            ),
            # Verify gathers its logits itself.
            f"{worker}._target_logits_processor": None,
            "sglang.srt.layers.logits_processor.LogitsProcessor.is_deferred_shard": None,
            "sglang.srt.layers.logits_processor.LogitsProcessor.finish_deferred_gather": None,
            # Parameters that the package does not pass.
            **_without_parameter(
                "sglang.srt.mem_cache.kv_index_translator.KVIndexTranslator.plan", "translated_writes"
            ),
            **_without_parameter(
                "sglang.srt.speculative.dflash_info.DFlashVerifyInput.prepare_for_verify",
                "defer_metadata_init",
            ),
            # Methods of a backend that nobody asks for yet.
            **{
                f"sglang.srt.layers.attention.base_attn_backend.AttentionBackend.{name}": None
                for name in (
                    "get_fused_kv_write_buffers",
                    "glue_target_verify_metadata",
                    "glue_draft_metadata",
                )
            },
        }
    )


NEWEST = Release(
    version=SUPPORTED_VERSION,
    contract=CONTRACT,
    draft_layout_attribute="draft_parallel_layout",
    defers_verify_gather=True,
    defers_verify_planning=True,
    has_block_verification=True,
)
RELEASES = (
    NEWEST,
    Release(
        version="0.5.22",
        contract=_contract_0_5_22(),
        draft_layout_attribute="draft_owns_attention",
        defers_verify_gather=False,
        defers_verify_planning=False,
        has_block_verification=False,
    ),
)
SUPPORTED_VERSIONS = tuple(release.version for release in RELEASES)
