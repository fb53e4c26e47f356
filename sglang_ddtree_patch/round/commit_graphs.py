"""The commit of a round as one launch: walk, KV moves and the drafter's feed, in CUDA graphs of their own.

Outside a graph they are some fifteen launches, which cost the host more than they cost the GPU. All they read
is where it was in every round of a shape: what a captured verify was given and left is at the verify's
addresses, and what the round chose is copied into buffers of ours. So one graph follows each graph of
verify, whatever the requests ask for: sampling, penalties and grammar end before it begins.

What the graph leaves is copied out at once, because SGLang reads a round's results while the next one runs.
"""

from __future__ import annotations

import bisect
import contextlib
import copy
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from sglang_ddtree_patch.kernels.accept.walk import AcceptedPath
from sglang_ddtree_patch.kernels.tree.build import TokenTree
from sglang_ddtree_patch.round.commit import TargetKVCommit, VerifiedBlock, commit_block

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class CapturedVerify:
    """What a graph of verify reads and leaves, at addresses that stay."""

    tokens: torch.Tensor  # [batch, width] int64
    prefix_lens: torch.Tensor  # [batch]; padded requests have one of their own
    slots: torch.Tensor  # [batch, width] int64, of the target's pool; slot 0, which is nobody's, for padding
    hidden_states: torch.Tensor  # [batch * width, size]

    @property
    def batch(self) -> int:
        return self.tokens.shape[0]

    @property
    def width(self) -> int:
        return self.tokens.shape[1]


@dataclass(frozen=True)
class CommitGraph:
    """The graph behind one graph of verify."""

    graph: Any  # torch.cuda.CUDAGraph
    parents: torch.Tensor  # [most requests, width] int64, read
    predictions: torch.Tensor  # [most requests, width] int64, read
    rows: torch.Tensor  # [batch, path] int64, left, as are all below
    block_rows: torch.Tensor
    packed: torch.Tensor  # int64: tokens [batch, path], then [batch] of bonus tokens, new and commit lengths

    def replay(self, tree: TokenTree, predictions: torch.Tensor) -> AcceptedPath:
        """Commit a round of as many requests as the tree has, at most ``batch`` of the graph."""
        requests, width = tree.parents.shape
        chosen = predictions.view(requests, width)
        torch._foreach_copy_([self.parents[:requests], self.predictions[:requests]], [tree.parents, chosen])
        self.graph.replay()
        batch, path = self.rows.shape
        tokens, bonus_tokens, new_lens, commit_lengths = self.packed.clone().split(
            [batch * path, batch, batch, batch]
        )
        return AcceptedPath(
            rows=self.rows[:requests],
            block_rows=self.block_rows[:requests],
            tokens=tokens.view(batch, path)[:requests],
            commit_lengths=commit_lengths[:requests],
            bonus_tokens=bonus_tokens[:requests],
            new_lens=new_lens[:requests],
        )


class CommitGraphs:
    """The commit graphs of a worker, by the width and the batch size of the verify before them."""

    def __init__(self, worker: Any):
        """To be made before the target's graphs are captured; they are watched from here on."""
        self._worker = worker
        # Several of one shape where a model has graphs with and without adapters.
        self._verifies: list[CapturedVerify] = []
        self._graphs: dict[tuple[int, int, int], CommitGraph] = {}  # by width, batch and address
        self._batches: dict[int, list[int]] = {}  # ascending, by width
        self._are_stale = False
        worker.model_runner.capture_tail_hooks.append(self._watch)

    def _watch(self, runner: Any, out: Any, forward_batch: Any, num_tokens: int) -> None:
        """SGLang's hook behind the forward of a graph; called while that is warmed up, too."""
        if torch.cuda.is_current_stream_capturing() and forward_batch.forward_mode.is_target_verify():
            if self._graphs:
                # SGLang captures anew, as it can be asked to with new weights: ours follow none of these.
                self._are_stale = True
                return
            batch = forward_batch.batch_size
            self._verifies.append(
                CapturedVerify(
                    forward_batch.input_ids.view(batch, -1),
                    forward_batch.seq_lens,
                    forward_batch.out_cache_loc.view(batch, -1),
                    out.hidden_states,
                )
            )

    def capture(self) -> None:
        """Record the graphs, when every verify has been captured; none where slots have several names."""
        # Kept as long as the graphs are: they read where its buffers lie from tensors that it owns.
        self._move_rows = TargetKVCommit(self._worker.model_runner.token_to_kv_pool)
        runners = self._worker.model_runner, self._worker.draft_model_runner
        if not self._verifies or not self._move_rows.is_recordable:
            return
        if any(runner.kv_index_translator.is_translating for runner in runners):
            return
        most = max(verify.batch for verify in self._verifies)
        like = {"dtype": torch.int64, "device": self._worker.device}
        inputs = {
            width: (torch.full((most, width), -1, **like), torch.zeros((most, width), **like))
            for width in {verify.width for verify in self._verifies}
        }
        pool, stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with own_workspace(self._worker) as self._workspace:
            # Large ones first: what is captured later fits into their memory.
            for verify in sorted(self._verifies, key=lambda verify: (-verify.batch, -verify.width)):
                graph = self._record(verify, *inputs[verify.width], pool, stream)
                self._graphs[verify.width, verify.batch, verify.hidden_states.data_ptr()] = graph
                self._batches.setdefault(verify.width, []).insert(0, verify.batch)
        torch.cuda.current_stream().wait_stream(stream)
        logger.info("DDTREE: %d CUDA graphs of commit, behind those of verify.", len(self._graphs))

    def _record(
        self,
        verify: CapturedVerify,
        parents: torch.Tensor,
        predictions: torch.Tensor,
        pool: Any,
        stream: Any,
    ) -> CommitGraph:
        batch, path = verify.batch, self._worker.sizes.of_width(verify.width).path

        def commit() -> tuple[AcceptedPath, torch.Tensor]:
            accepted = commit_captured(
                self._worker, self._move_rows, verify, parents[:batch], predictions[:batch], path
            )
            return accepted, pack(accepted)

        # Once before, so that kernels are compiled and loaded. Its rows go to slot 0.
        with torch.cuda.stream(stream):
            commit()
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool, stream=stream):
            accepted, packed = commit()
        return CommitGraph(graph, parents, predictions, accepted.rows, accepted.block_rows, packed)

    def behind(self, verified: Any, tree: TokenTree) -> CommitGraph | None:
        """The graph to replay behind a verify.

        Args:
            verified: SGLang's result of the verify, which has run just now.
            tree: that it ran over.

        Returns:
            None where no graph was captured of that verify.
        """
        requests, width = tree.parents.shape
        batches = self._batches.get(width, [])
        place = bisect.bisect_left(batches, requests)  # the next larger graph is the one that ran
        if self._are_stale or not verified.can_run_cuda_graph or place == len(batches):
            return None
        address = verified.logits_output.hidden_states.data_ptr()
        return self._graphs.get((width, batches[place], address))


def commit_captured(
    worker: Any,
    move_rows: TargetKVCommit,
    verify: CapturedVerify,
    parents: torch.Tensor,
    predictions: torch.Tensor,
    path: int,
) -> AcceptedPath:
    """What is recorded: the commit of the blocks of one captured verify, with its padded requests.

    They walk along parents and predictions of an earlier round; all their rows lie in slot 0.
    """
    offsets = torch.arange(path, device=parents.device)
    block = VerifiedBlock(
        tokens=verify.tokens,
        parents=parents,
        prefix_lens=verify.prefix_lens,
        slots=verify.slots,
        draft_slots=verify.slots[:, :path].contiguous(),
        positions=(verify.prefix_lens.long()[:, None] + offsets).flatten(),
        hidden_states=verify.hidden_states,
    )
    return commit_block(worker, move_rows, block, predictions)


def pack(accepted: AcceptedPath) -> torch.Tensor:
    """What outlives a round, as `CommitGraph.packed` has it."""
    return torch.cat(
        [
            accepted.tokens.flatten(),
            accepted.bonus_tokens,
            accepted.new_lens,
            accepted.commit_lengths.to(torch.int64),
        ]
    )


@contextlib.contextmanager
def own_workspace(worker: Any) -> Iterator[Any]:
    """A scope in which the drafter is fed through memory that stays.

    SGLang's feed replaces its workspace when a longer prefill comes, and graphs would go on writing to the
    old one. What is yielded owns the memory.
    """
    shared = worker._fused_kv_helper
    if shared is None:
        yield None
        return
    own = copy.copy(shared)
    own._workspace_capacity = 0
    worker._fused_kv_helper = own
    try:
        yield own
    finally:
        worker._fused_kv_helper = shared
