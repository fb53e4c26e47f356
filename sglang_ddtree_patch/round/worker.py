"""The DDTREE worker: one decode round, step by step.

    slots    slots and positions behind each prefix             slots.py
    draft    DFlash block forward -> candidates a position      draft_step.py
    tree     best prefixes under the width -> block rows        kernels/tree/build.py
    verify   target forward over the block                      verify_input.py, attention/backend.py
    choose   the target's own token after every row             target_choice.py
    accept   walk from the root along the target's tokens       kernels/accept/walk.py
    commit   accepted rows to the front, drafter fed            commit.py

Everything around the round (draft model, pools, prefill, the drafter's KV) is DFlashWorkerV2's.
"""

from __future__ import annotations

import contextlib
import functools
from typing import Any

import torch
from sglang.srt.distributed.parallel_state import get_tp_group
from sglang.srt.layers.logprob_processor import compute_spec_logprobs
from sglang.srt.layers.sampler import Sampler
from sglang.srt.lora.layers import unwrap_lora_layer
from sglang.srt.managers.utils import GenerationBatchResult
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode
from sglang.srt.runtime_context import get_observability, get_spec
from sglang.srt.speculative.dflash_worker_v2 import DFlashWorkerV2
from sglang.srt.speculative.spec_tp_sync import SpecTpSyncSite

from sglang_ddtree_patch.contract_check import installed_release
from sglang_ddtree_patch.errors import ConfigurationError
from sglang_ddtree_patch.kernels.accept.walk import AcceptedPath
from sglang_ddtree_patch.kernels.tree.build import TokenTree, build_token_tree, root_only_tree
from sglang_ddtree_patch.metrics.round_times import RoundClock
from sglang_ddtree_patch.round.block import BlockSizes
from sglang_ddtree_patch.round.commit import TargetKVCommit, commit_block, planned_block
from sglang_ddtree_patch.round.commit_graphs import CommitGraphs
from sglang_ddtree_patch.round.draft_graph import RecordedTrees
from sglang_ddtree_patch.round.draft_prefix import verify_host_bound
from sglang_ddtree_patch.round.draft_step import block_candidates, can_record, draft_candidates
from sglang_ddtree_patch.round.rehearsal import rehearse_small_steps
from sglang_ddtree_patch.round.result import RoundResult
from sglang_ddtree_patch.round.slots import RoundSlots, SlotPlanner
from sglang_ddtree_patch.round.target_choice import adjust_logits, choose_tokens
from sglang_ddtree_patch.round.verify_graphs import VerifyGraphs
from sglang_ddtree_patch.round.verify_input import DDTreeDraftInput, TreeVerifyInput
from sglang_ddtree_patch.sampling.custom_processors import CustomProcessors
from sglang_ddtree_patch.sampling.grammar_tree import GrammarOnTree
from sglang_ddtree_patch.sampling.penalty_history import PenaltyHistory
from sglang_ddtree_patch.sampling.seeded_sampler import SeededSampler, attach_seeds
from sglang_ddtree_patch.settings import candidates_per_position, widths_are_chosen
from sglang_ddtree_patch.widths.agreement import ranks_of
from sglang_ddtree_patch.widths.choice import ChosenWidth, FixedWidth


class DDTreeWorker(DFlashWorkerV2):
    """Drafts, verifies and commits token trees on SGLang's V2 speculative schema."""

    def __init__(self, server_args: Any, gpu_id: int, nccl_port: int, target_worker: Any):
        spec = get_spec()
        vocabulary = target_worker.model_runner.model_config.vocab_size
        self.sizes = BlockSizes(
            width=int(spec.speculative_num_draft_tokens),
            draft=int(spec.speculative_dflash_block_size),
            candidates=min(candidates_per_position(), vocabulary),
            widest=int(spec.speculative_num_draft_tokens),
        )
        with self._draft_width():
            super().__init__(server_args, gpu_id, nccl_port, target_worker)
        if self.selector is not None or self.lilicorr is not None:
            raise ConfigurationError(
                "the draft model carries a selector or LiLiCorr head, which proposes one chain: "
                "DDTREE needs a plain DFlash drafter."
            )
        # Prefill draws its one token with it as well. A sampler registered by another plugin stays.
        if type(target_worker.model_runner.sampler) is Sampler:
            target_worker.model_runner.sampler = SeededSampler()
        self._history = PenaltyHistory(vocabulary, self.device)
        self._processors = CustomProcessors()
        is_chosen = widths_are_chosen()
        self._width = (
            ChosenWidth(self.sizes, self.device, ranks_of(get_tp_group()))
            if is_chosen
            else FixedWidth(self.sizes)
        )
        self._has_metrics = get_observability().enable_metrics
        self._clock = RoundClock(self.device, is_chosen or self._has_metrics, self._has_metrics)
        self.recorded_trees = RecordedTrees(
            functools.partial(block_candidates, self), self._width.expected, self.sizes.widest
        )
        self._commit_graphs = CommitGraphs(self)
        # Schedulers and metrics read the verify width here; the parent set the drafter's block.
        self.speculative_num_draft_tokens = self.sizes.width

    def _draft_width(self) -> contextlib.AbstractContextManager:
        """A scope where SGLang's one width is the drafter's block, as all of the parent's set-up reads it."""
        return get_spec().override(speculative_num_draft_tokens=self.sizes.draft)

    @property
    def draft_head(self) -> Any:
        """The target's head, which scores the drafter's positions."""
        return unwrap_lora_layer(self.target_worker.model_runner.model.lm_head)

    def alloc_memory_pool(self, *args: Any, **kwargs: Any) -> None:
        with self._draft_width():
            super().alloc_memory_pool(*args, **kwargs)

    def init_attention_backends(self) -> None:
        with self._draft_width():
            super().init_attention_backends()

    def init_cuda_graphs(self) -> None:
        with self._draft_width():
            super().init_cuda_graphs()
        self._graphs = VerifyGraphs(self.target_worker.model_runner, self._width.widths)
        self._commit_graphs.capture()

    def _maybe_build_draft_sampler(self) -> None:
        """No argmax inside the drafter's graphs, but candidates and tree. Called before they are captured."""
        if can_record(self):
            self.draft_model_runner.capture_tail_hooks.append(self.recorded_trees.record)

    def _validate_phase1_sampling_support(self, batch: Any) -> None:
        """No word of a greedy fallback: every row is sampled by the target's own rule (target_choice.py)."""

    def prewarm_sampling(self) -> Any:
        """Rehearse what a round runs outside graphs; not the parent's chain, which never runs here."""
        rehearse_small_steps(self, self._width.widths)
        return self.model_runner.prewarm_sampling()

    def _make_next_draft_input_prefill(
        self, *, bonus_tokens: torch.Tensor, seq_lens: torch.Tensor
    ) -> DDTreeDraftInput:
        return DDTreeDraftInput.after(bonus_tokens=bonus_tokens, new_seq_lens=seq_lens)

    def _make_next_draft_input_decode(
        self, *, bonus_tokens: torch.Tensor, new_seq_lens: torch.Tensor
    ) -> DDTreeDraftInput:
        return DDTreeDraftInput.after(bonus_tokens=bonus_tokens, new_seq_lens=new_seq_lens)

    def forward_batch_generation(
        self, batch: Any, on_publish: Any = None, grammar_barrier: Any = None, pp_proxy_tensors: Any = None
    ) -> GenerationBatchResult:
        """Prefill and idle batches go to the parent; a decode batch is one tree round."""
        attach_seeds(batch, self.target_worker.model_runner.sampler)
        if batch.forward_mode.is_extend() or batch.is_extend_in_batch or batch.forward_mode.is_idle():
            self._history.begin(batch)
            self._clock.interrupt()
            result = super().forward_batch_generation(batch, on_publish, grammar_barrier, pp_proxy_tensors)
            self._remember(batch, result.next_token_ids[:, None], torch.ones_like(batch.seq_lens))
            return result
        return self._decode_round(batch, on_publish, grammar_barrier)

    def _decode_round(self, batch: Any, on_publish: Any, grammar_barrier: Any) -> RoundResult:
        times = self._clock.start()
        sizes, context = self._width.choose(batch)
        prefix_lens, draft_input = batch.seq_lens, batch.spec_info
        # The previous round may have produced the lengths on another stream.
        prefix_lens.record_stream(torch.get_device_module(self.device).current_stream())

        host_lens = batch.seq_lens_cpu
        slots = self.plan_slots(
            request_ids=batch.req_pool_indices,
            prefix_lens=prefix_lens,
            host_lens=host_lens if host_lens is not None else draft_input.nxt_kv_lens_cpu,
            root_tokens=draft_input.bonus_tokens,
        )
        tree, expected = self._draft_tree(batch, slots, sizes, times)
        grammar = GrammarOnTree.of(batch, tree)
        result = self._verify(batch, tree, slots.plan)
        logits_output = result.logits_output
        times.mark("verify")
        grammar_mask = grammar and grammar.mask(batch, grammar_barrier)
        predictions = self._choose(batch, tree, logits_output, grammar_mask, sizes)
        times.mark("choose")
        accepted = self._commit(batch, tree, slots, predictions, result)
        if on_publish is not None:
            on_publish(accepted.new_lens)
        # Large, and copied to the host by the scheduler if it is still there.
        logits_output.hidden_states = None
        times.mark("commit")

        return RoundResult(
            logits_output=logits_output,
            next_token_ids=accepted.tokens.flatten(),
            accept_lens=accepted.commit_lengths,
            can_run_cuda_graph=result.can_run_cuda_graph,
            next_draft_input=self._make_next_draft_input_decode(
                bonus_tokens=accepted.bonus_tokens, new_seq_lens=accepted.new_lens
            ),
            speculative_num_draft_tokens=sizes.width,
            speculative_output_stride=sizes.path,
            new_seq_lens=accepted.new_lens,
            routed_experts_output=result.routed_experts_output,
            indexer_topk_output=result.indexer_topk_output,
            width=sizes.width,
            # A copy: the next round's graph may write where they are before SGLang's stream has copied them.
            node_counts=tree.node_counts.clone() if self._has_metrics else None,
            times=times,
            context=context,
            expected=expected,
            choice=self._width,
        )

    def _draft_tree(
        self, batch: Any, slots: RoundSlots, sizes: BlockSizes, times: Any
    ) -> tuple[TokenTree, torch.Tensor | None]:
        """The block, and what each width may expect of it where that is asked."""
        roots, prefix_lens = batch.spec_info.bonus_tokens, batch.seq_lens
        if sizes.width == 1:
            return root_only_tree(roots, sizes.width, prefix_lens), None
        candidates = draft_candidates(self, batch, slots, sizes)
        times.mark("draft")
        if candidates.built is not None:
            tree, expected = candidates.built
        else:
            tree = build_token_tree(roots, candidates.tokens, candidates.log_probs, sizes.widest, prefix_lens)
            expected = self._width.expected(tree)
        tree = tree.narrowed(sizes.width)
        times.mark("tree")
        return tree, expected

    @functools.cached_property
    def _move_rows(self) -> TargetKVCommit:
        """Built in the first round, when the pools are there."""
        return TargetKVCommit(self.target_worker.model_runner.token_to_kv_pool)

    @functools.cached_property
    def plan_slots(self) -> SlotPlanner:
        return SlotPlanner(self.target_worker.model_runner, self.sizes, int(self._mask_token_id))

    def _verify(self, batch: Any, tree: TokenTree, plan: Any) -> GenerationBatchResult:
        """One target forward over all rows of all trees; row i writes slot i, rotated by its depth."""
        target, columns = self.target_worker.model_runner, self.sizes.columns(tree.width)
        host_bound, host_sum = verify_host_bound(batch, tree.width)
        verify_input = TreeVerifyInput(
            draft_token=tree.tokens.flatten(),
            positions=tree.positions.flatten(),
            draft_token_num=tree.width,
            capture_hidden_mode=CaptureHiddenMode.FULL,
            kv_loc_plan=plan,
            kv_loc_cols=columns,
            tree_masks=tree.masks,
        )
        batch.out_cache_loc = plan.write_ids(target.kv_index_translator, cols=columns)
        committed = batch.seq_lens_cpu, batch.seq_lens_sum
        batch.seq_lens_cpu, batch.seq_lens_sum = host_bound, host_sum
        self._graphs.use(tree.width)
        result = installed_release().verify(verify_input, batch, self.target_worker)
        batch.seq_lens_cpu, batch.seq_lens_sum = committed
        logits_output = result.logits_output
        logits_output.next_token_logits = installed_release().whole_logits(
            self, logits_output.next_token_logits
        )
        return result

    def _choose(
        self, batch: Any, tree: TokenTree, logits_output: Any, grammar_mask: Any, sizes: BlockSizes
    ) -> torch.Tensor:
        """The target's token after every row, by the rules of its request: [batch * width] int64."""
        info, prefix_lens, logits = batch.sampling_info, batch.seq_lens, logits_output.next_token_logits
        penalties = self._history.of(batch, prefix_lens + 1)
        adjust_logits(
            logits, info, tree, penalties=penalties, grammar_mask=grammar_mask, longest=sizes.path - 1
        )
        self._processors.apply(batch, logits, tree, prefix_lens)
        sampler = self.target_worker.model_runner.sampler
        predictions = choose_tokens(
            sampler, logits_output, info, tree, prefix_lens, keep_logits=batch.return_logprob
        )
        # One rank's draw for all of them.
        is_greedy = info.is_all_greedy
        site = SpecTpSyncSite.DFLASH_ACCEPT_GREEDY if is_greedy else SpecTpSyncSite.DFLASH_ACCEPT_SAMPLE
        self._tp_sync.sync(site, predictions)
        return predictions

    def _commit(
        self, batch: Any, tree: TokenTree, slots: RoundSlots, predictions: torch.Tensor, result: Any
    ) -> AcceptedPath:
        """Walk, move rows, feed the drafter; keep what later rounds and log-probs need of the path."""
        graph = self._commit_graphs.behind(result, tree)
        if graph is not None:
            accepted = graph.replay(tree, predictions)
        else:
            block = planned_block(self, tree, slots, batch.seq_lens, result.logits_output.hidden_states)
            accepted = commit_block(self, self._move_rows, block, predictions.view(-1, tree.width))
        self._remember(batch, accepted.tokens, accepted.commit_lengths)
        if batch.return_logprob:
            compute_spec_logprobs(batch, result.logits_output, predictions, accept_index=accepted.block_rows)
        return accepted

    def _remember(self, batch: Any, tokens: torch.Tensor, lengths: torch.Tensor) -> None:
        """Keep what was said for the rules that depend on it: the first ``lengths`` of ``tokens``."""
        self._history.record(batch, tokens, lengths)
        self._processors.record(batch, tokens, lengths)
