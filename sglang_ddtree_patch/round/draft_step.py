"""Draft: one forward of the DFlash drafter over a block, down to candidates a position."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from sglang.srt.layers.logits_processor import should_apply_lm_head_quant_method
from sglang.srt.lora.layers import unwrap_lora_layer
from sglang.srt.model_executor.forward_batch_info import (
    CaptureHiddenMode,
    ForwardBatch,
    ForwardMode,
    enable_num_token_non_padded,
)
from sglang.srt.models.dflash import candidate_topk
from sglang.srt.runtime_context import get_parallel
from sglang.srt.speculative.dflash_utils import is_dense_head_weight
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
from sglang.srt.speculative.spec_utils import draft_tp_context

from sglang_ddtree_patch.contract_check import installed_release
from sglang_ddtree_patch.kernels.device import has_kernels
from sglang_ddtree_patch.kernels.tree.build import TokenTree
from sglang_ddtree_patch.kernels.tree.candidates import top_log_probs
from sglang_ddtree_patch.round.block import BlockSizes
from sglang_ddtree_patch.round.draft_prefix import DraftPrefix, recent_prefix, whole_prefix
from sglang_ddtree_patch.round.slots import RoundSlots


@dataclass(frozen=True)
class Candidates:
    """The drafter's best tokens at each position behind the root, best first."""

    tokens: torch.Tensor  # [batch, draft - 1, candidates] int64
    log_probs: torch.Tensor  # [batch, draft - 1, candidates] float32
    # Their tree of the largest width, where the drafter's CUDA graph has built it already,
    built: tuple[TokenTree, torch.Tensor | None] | None = None  # and what each width may expect of it


def draft_candidates(worker: Any, batch: Any, slots: RoundSlots, sizes: BlockSizes) -> Candidates:
    """Run the drafter on ``[root, mask, mask, ...]`` of every request.

    Args:
        worker: the DFLASH worker that owns the draft model (`DDTreeWorker`).
        batch: SGLang's ScheduleBatch of a decode round.
        slots: the round's slots and positions, and the block's tokens.
        sizes: rows and positions of the round.

    Returns:
        Candidates; log-probabilities are normalized over the whole vocabulary, on all ranks alike.
    """
    plan, reader = slots.plan, worker.draft_model_runner.kv_index_translator
    if worker.use_compact_draft_cache:
        prefix = recent_prefix(worker, batch, plan, sizes)
        plan = plan.reads_from(
            reader, seq_lens=prefix.lens, seq_lens_cpu=prefix.host_bound, read_extent=sizes.draft
        )
    else:
        prefix = whole_prefix(batch, sizes)
    forward_batch = _block_forward_batch(worker, batch, slots, prefix, sizes)
    plan.bind(forward_batch, reader, cols=sizes.columns(sizes.draft))
    with torch.inference_mode(), draft_tp_context(installed_release().draft_layout(worker)):
        drafted = worker.draft_model_runner.forward(forward_batch)
        hidden = drafted.logits_output.hidden_states
        if drafted.can_run_graph:
            built = worker.recorded_trees.of(hidden, len(batch.seq_lens))
            if built is not None:
                return Candidates(built.candidate_tokens, built.log_probs, (built.tree, built.expectation()))
        return Candidates(*block_candidates(worker, hidden))


def block_candidates(worker: Any, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Candidates behind the root of every block, from the drafter's ``hidden`` [batch * draft, size]."""
    sizes = worker.sizes
    hidden = hidden.view(-1, sizes.draft, hidden.shape[-1])[:, 1:]
    tokens, log_probs = head_candidates(hidden.flatten(0, 1), worker.draft_head, sizes.candidates)
    shape = (*hidden.shape[:2], sizes.candidates)
    return tokens.view(shape), log_probs.view(shape)


def head_candidates(hidden: torch.Tensor, head: Any, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The ``count`` best tokens after each of ``hidden`` [rows, size], and their log-probs: [rows, count].

    Where one NVIDIA GPU holds the whole head as plain weights, that is a product and two launches; SGLang's
    own function, of about fifteen small launches, also knows sharded and quantized heads.
    """
    if has_kernels(hidden.device) and _is_whole_and_plain(head):
        weight = head.weight[: head.org_vocab_size]
        return top_log_probs(hidden.to(weight.dtype) @ weight.T, count)
    tokens, logits, partition = candidate_topk(hidden, head, count, with_partition=True)
    return tokens, logits.float() - partition.float()[:, None]


def can_record(worker: Any) -> bool:
    """Whether candidates and tree may be recorded into the drafter's CUDA graphs; asked in their scope."""
    return has_kernels(worker.device) and _is_whole_and_plain(worker.draft_head)


def _is_whole_and_plain(head: Any) -> bool:
    return (
        get_parallel().tp_size == 1
        and is_dense_head_weight(head.weight)
        and not should_apply_lm_head_quant_method(head, head.quant_method)
    )


def rehearse_head(worker: Any, sizes: BlockSizes) -> None:
    """Run `head_candidates` once, at start, so that no round compiles its kernels."""
    layout, runner = installed_release().draft_layout(worker), worker.draft_model_runner
    shape = (sizes.draft - 1, runner.model_config.hidden_size)
    with torch.inference_mode(), draft_tp_context(layout):
        hidden = torch.zeros(shape, dtype=runner.dtype, device=worker.device)
        head_candidates(hidden, worker.draft_head, sizes.candidates)


def _block_forward_batch(
    worker: Any, batch: Any, slots: RoundSlots, prefix: DraftPrefix, sizes: BlockSizes
) -> ForwardBatch:
    """The drafter's forward over the block, planned on host bounds so that nothing waits for a length.

    Its positions are those of the target, whatever part of the prefix it attends to.
    """
    count, device = len(batch.seq_lens), worker.device
    embed = unwrap_lora_layer(worker.target_worker.model_runner.model.get_input_embeddings())
    input_embeds = embed(slots.block_ids)
    if worker._noise_embed_scale != 1.0:
        input_embeds = input_embeds * worker._noise_embed_scale
    return ForwardBatch(
        forward_mode=ForwardMode.TARGET_VERIFY,
        batch_size=count,
        input_ids=slots.block_ids.flatten(),
        req_pool_indices=batch.req_pool_indices,
        seq_lens=prefix.lens,
        out_cache_loc=None,
        seq_lens_sum=prefix.host_sum,
        seq_lens_cpu=prefix.host_bound,
        positions=slots.positions.flatten(),
        input_embeds=input_embeds.flatten(0, 1),
        # The draft model runs as DFLASH does: a block verify without a causal mask.
        spec_algorithm=SpeculativeAlgorithm.DFLASH,
        spec_info=worker._draft_block_spec_info,
        capture_hidden_mode=CaptureHiddenMode.NULL,
        num_token_non_padded=(
            torch.full((), count * sizes.draft, dtype=torch.int32, device=device)
            if enable_num_token_non_padded()
            else None
        ),
        global_num_token_non_padded_cpu=count * sizes.draft,
        can_run_decode_cuda_graph=batch.can_run_decode_cuda_graph,
    )
