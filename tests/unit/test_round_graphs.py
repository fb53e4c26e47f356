"""What a round records into CUDA graphs gives what the same steps give outside one, padded or not."""

from __future__ import annotations

import contextlib
import gc
import weakref
from types import SimpleNamespace

import pytest
import torch

from sglang_ddtree_patch.kernels.tree.build import TokenTree, build_token_tree
from sglang_ddtree_patch.round import commit_graphs, draft_graph
from sglang_ddtree_patch.round.block import BlockSizes
from sglang_ddtree_patch.round.commit import VerifiedBlock, commit_block
from sglang_ddtree_patch.round.commit_graphs import (
    CapturedVerify,
    CommitGraph,
    CommitGraphs,
    commit_captured,
    pack,
)
from sglang_ddtree_patch.round.draft_graph import RecordedTrees

DRAFT, CANDIDATES, VOCABULARY, SIZE, POOL = 5, 3, 11, 4, 400
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


class Worker:
    """Stands for the worker: a pool of one number a slot, and a drafter that keeps what it is fed."""

    def __init__(self, device: str, widest: int = 9):
        self.device = device
        self.sizes = BlockSizes(width=widest, draft=DRAFT, candidates=CANDIDATES, widest=widest)
        self.target = torch.arange(POOL, device=device)
        self.fed = torch.zeros(POOL, SIZE, device=device)
        self.fed_at = torch.full((POOL,), -1, device=device)
        runner = SimpleNamespace(
            capture_tail_hooks=[],
            token_to_kv_pool=None,
            kv_index_translator=SimpleNamespace(is_translating=False),
        )
        self.model_runner, self.draft_model_runner = runner, runner
        self._fused_kv_helper = SimpleNamespace(_workspace_capacity=7)

    is_recordable = True

    def move_rows(self, slots, accepted) -> None:
        rows = self.target[slots.gather(1, accepted.rows)]
        self.target.index_put_((slots[:, : rows.shape[1]],), rows)

    __call__ = move_rows

    def _append_target_hidden_to_draft_kv_by_loc(
        self, *, target_hidden, cache_loc, cache_loc_2d, positions, commit_lens
    ):
        """Writes slot 0 for rows that are not committed, so that shapes do not depend on lengths."""
        path = cache_loc_2d.shape[1]
        is_committed = torch.arange(path, device=self.device) < commit_lens[:, None]
        where = torch.where(is_committed, cache_loc_2d, 0).flatten()
        assert self.device == "cuda" or torch.equal(cache_loc_2d.flatten(), cache_loc)
        self.fed.index_copy_(0, where, target_hidden)
        self.fed_at.index_copy_(0, where, positions)

    def written(self) -> tuple[torch.Tensor, ...]:
        """All but slot 0, which is nobody's."""
        return self.target[1:].clone(), self.fed[1:].clone(), self.fed_at[1:].clone()


def a_round(
    seed: int, requests: int, width: int, device: str
) -> tuple[VerifiedBlock, TokenTree, torch.Tensor]:
    """A round's blocks, trees and the target's choice, which often is a child."""
    generator = torch.Generator().manual_seed(seed)

    def draw(high: int, *shape: int) -> torch.Tensor:
        return torch.randint(1, high, shape, generator=generator)

    lens = draw(50, requests)
    log_probs = torch.randn(requests, DRAFT - 1, CANDIDATES, generator=generator).log_softmax(-1)
    tokens = draw(VOCABULARY, requests, DRAFT - 1, CANDIDATES)
    tree = build_token_tree(draw(VOCABULARY, requests), tokens, log_probs.sort(-1, True).values, width, lens)
    predictions = draw(VOCABULARY, requests, width)
    predictions.scatter_(1, tree.parents[:, 1:].clamp(min=0), tree.tokens[:, 1:])
    path = min(width, DRAFT)
    slots = 1 + torch.randperm(POOL - 1, generator=generator)[: requests * width].view(requests, width)
    block = VerifiedBlock(
        tokens=tree.tokens,
        parents=tree.parents,
        prefix_lens=lens,
        slots=slots,
        draft_slots=slots[:, :path].contiguous(),
        positions=(lens[:, None] + torch.arange(path)).flatten(),
        hidden_states=torch.randn(requests * width, SIZE, generator=generator),
    )
    on_device = [
        type(it)(**{name: None if value is None else value.to(device) for name, value in vars(it).items()})
        for it in (block, tree)
    ]
    return *on_device, predictions.to(device)


def captured_verify(batch: int, width: int, device: str) -> CapturedVerify:
    """As a graph's warm-up leaves it: all requests are padding."""
    return CapturedVerify(
        tokens=torch.zeros((batch, width), dtype=torch.int64, device=device),
        prefix_lens=torch.ones(batch, dtype=torch.int64, device=device),
        slots=torch.zeros((batch, width), dtype=torch.int64, device=device),
        hidden_states=torch.zeros(batch * width, SIZE, device=device),
    )


def fill(verify: CapturedVerify, block: VerifiedBlock) -> None:
    """What SGLang does before a replay: live requests in front, padding behind them."""
    requests, width = block.tokens.shape
    verify.tokens[:requests] = block.tokens
    verify.prefix_lens[:requests], verify.prefix_lens[requests:] = block.prefix_lens, 1
    verify.slots[:requests], verify.slots[requests:] = block.slots, 0
    verify.hidden_states[: requests * width] = block.hidden_states


class Replay:
    """Stands for a CUDA graph: what was recorded, run again into the memory it was recorded with."""

    def __init__(self, recorded):
        self._recorded = recorded
        self.outputs = recorded()

    def replay(self) -> None:
        for kept, made in zip(self.outputs, self._recorded(), strict=True):
            kept.copy_(made)


def simulated(worker: Worker, verify: CapturedVerify) -> CommitGraph:
    path = worker.sizes.of_width(verify.width).path
    parents = torch.full((8, verify.width), -1)
    predictions = torch.zeros((8, verify.width), dtype=torch.int64)

    def recorded() -> tuple[torch.Tensor, ...]:
        accepted = commit_captured(
            worker, worker, verify, parents[: verify.batch], predictions[: verify.batch], path
        )
        return accepted.rows, accepted.block_rows, pack(accepted)

    graph = Replay(recorded)
    return CommitGraph(graph, parents, predictions, *graph.outputs)


def captured(worker: Worker, verify: CapturedVerify, monkeypatch) -> CommitGraph:
    """By CUDA, through all that `CommitGraphs` does at the start of a server."""
    monkeypatch.setattr(commit_graphs, "TargetKVCommit", lambda pool: worker)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    graphs = CommitGraphs(worker)
    (watch,) = worker.model_runner.capture_tail_hooks
    batch = SimpleNamespace(
        batch_size=verify.batch,
        forward_mode=SimpleNamespace(is_target_verify=lambda: True),
        input_ids=verify.tokens.flatten(),
        seq_lens=verify.prefix_lens,
        out_cache_loc=verify.slots.flatten(),
    )
    watch(None, SimpleNamespace(hidden_states=verify.hidden_states), batch, verify.batch * verify.width)
    monkeypatch.undo()
    monkeypatch.setattr(commit_graphs, "TargetKVCommit", lambda pool: worker)
    graphs.capture()
    assert worker._fused_kv_helper._workspace_capacity == 7, "the eager feed's workspace was touched"
    result = SimpleNamespace(
        can_run_cuda_graph=True, logits_output=SimpleNamespace(hidden_states=verify.hidden_states)
    )
    tree = SimpleNamespace(parents=torch.empty(verify.batch, verify.width))
    return graphs.behind(result, tree)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("width", [1, 4, 9])
def test_a_commit_from_a_graph_is_the_commit(device: str, width: int, monkeypatch) -> None:
    """Rounds of different sizes through one graph, each with stale requests of the one before behind it."""
    worker, eager = Worker(device), Worker(device)
    verify = captured_verify(4, width, device)
    graph = simulated(worker, verify) if device == "cpu" else captured(worker, verify, monkeypatch)
    earlier = []
    for seed, requests in enumerate((4, 1, 3, 2, 4, 1)):
        block, tree, predictions = a_round(seed, requests, width, device)
        fill(verify, block)
        accepted = graph.replay(tree, predictions.flatten())
        expected = commit_block(eager, eager, block, predictions)
        for name, value in vars(expected).items():
            assert torch.equal(getattr(accepted, name).to(value.dtype), value), (seed, name)
        for ours, theirs in zip(worker.written(), eager.written(), strict=True):
            assert torch.equal(ours, theirs), seed
        # What the scheduler still reads of an earlier round stays as it was.
        earlier.append((accepted, expected))
        for kept, wanted in earlier:
            for name in ("tokens", "commit_lengths", "bonus_tokens", "new_lens"):
                assert torch.equal(getattr(kept, name).to(getattr(wanted, name).dtype), getattr(wanted, name))


def test_a_commit_takes_the_graph_of_the_verify_that_ran():
    graphs = CommitGraphs(Worker("cpu"))
    left = {shape: torch.zeros(1) for shape in ((9, 1), (9, 4), (4, 1), (9, 4, "adapters"))}
    graphs._batches = {9: [1, 4, 4], 4: [1]}
    graphs._graphs = {(*shape[:2], hidden.data_ptr()): shape for shape, hidden in left.items()}

    def behind(requests: int, width: int, hidden: torch.Tensor, can_run: bool = True):
        verified = SimpleNamespace(
            can_run_cuda_graph=can_run, logits_output=SimpleNamespace(hidden_states=hidden)
        )
        return graphs.behind(verified, SimpleNamespace(parents=torch.empty(requests, width)))

    assert behind(1, 9, left[9, 1]) == (9, 1)
    assert behind(2, 9, left[9, 4]) == behind(4, 9, left[9, 4]) == (9, 4)
    assert behind(3, 9, left[9, 4, "adapters"]) == (9, 4, "adapters")
    assert behind(1, 4, left[4, 1]) == (4, 1)
    assert behind(5, 9, left[9, 4]) is None, "more requests than any graph has"
    assert behind(1, 5, left[9, 1]) is None, "a width without graphs"
    assert behind(1, 9, torch.zeros(1)) is None, "a verify of no graph"
    assert behind(1, 9, left[9, 1], can_run=False) is None


def test_ids_that_a_pool_translates_are_committed_without_graphs(monkeypatch):
    worker = Worker("cpu")
    monkeypatch.setattr(commit_graphs, "TargetKVCommit", lambda pool: worker)
    graphs = CommitGraphs(worker)
    graphs._verifies = [captured_verify(1, 4, "cpu")]
    worker.draft_model_runner.kv_index_translator.is_translating = True
    graphs.capture()  # on this machine a capture would raise
    assert not graphs._graphs


def recorded_without_cuda(monkeypatch) -> None:
    """What `CommitGraphs.capture` asks of CUDA does nothing: a capture is a run."""
    stream = SimpleNamespace(wait_stream=lambda other: None, synchronize=lambda: None)
    for name, made in {
        "graph_pool_handle": None,
        "Stream": stream,
        "current_stream": stream,
        "CUDAGraph": None,
        "stream": contextlib.nullcontext(),
        "graph": contextlib.nullcontext(),
    }.items():
        monkeypatch.setattr(torch.cuda, name, lambda *given, made=made, **options: made)


def test_where_the_pool_lies_is_kept_as_long_as_the_graphs_that_read_it_there(monkeypatch) -> None:
    """Graphs hold addresses of tensors, not the tensors: what they read of a freed one is anybody's."""
    worker, movers = Worker("cpu"), []

    class Mover:
        is_recordable = True

        def __init__(self, pool):
            movers.append(weakref.ref(self))

        def __call__(self, slots, accepted) -> None:
            worker.move_rows(slots, accepted)

    monkeypatch.setattr(commit_graphs, "TargetKVCommit", Mover)
    recorded_without_cuda(monkeypatch)
    graphs = CommitGraphs(worker)
    graphs._verifies = [captured_verify(batch, 4, "cpu") for batch in (1, 4)]
    graphs.capture()
    gc.collect()
    assert len(graphs._graphs) == 2
    (mover,) = movers
    assert mover() is not None


def test_what_sglang_captures_anew_is_committed_without_graphs(monkeypatch) -> None:
    worker = Worker("cpu")
    graphs = CommitGraphs(worker)
    left = torch.zeros(1)
    graphs._batches, graphs._graphs = {9: [1]}, {(9, 1, left.data_ptr()): "a graph"}
    result = SimpleNamespace(can_run_cuda_graph=True, logits_output=SimpleNamespace(hidden_states=left))
    tree = SimpleNamespace(parents=torch.empty(1, 9))
    assert graphs.behind(result, tree) == "a graph"
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    (watch,) = worker.model_runner.capture_tail_hooks
    mode = SimpleNamespace(is_target_verify=lambda: True)
    watch(None, SimpleNamespace(hidden_states=left), SimpleNamespace(forward_mode=mode, batch_size=1), 9)
    assert graphs.behind(result, tree) is None, "it may be of the verify before"


def drafted(hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Candidates of a drafter whose hidden states are its log-probs already."""
    hidden = hidden.view(-1, DRAFT, VOCABULARY)[:, 1:]
    log_probs, tokens = hidden.log_softmax(-1).topk(CANDIDATES)
    return tokens, log_probs


def test_what_is_recorded_is_left_outside_the_memory_that_graphs_share(monkeypatch) -> None:
    """A verify replays between the drafter's graph and the commit, and writes where that one left things."""
    monkeypatch.setattr(draft_graph, "is_capturing", lambda device: False)
    trees = RecordedTrees(drafted, lambda tree: tree.scores.exp().sum(1, keepdim=True), width=9)
    out = SimpleNamespace(hidden_states=torch.randn(2 * DRAFT, VOCABULARY))
    places = torch.arange(2 * DRAFT)
    batch = SimpleNamespace(batch_size=2, input_ids=places % VOCABULARY, positions=places)
    trees.record(None, out, batch, 2 * DRAFT)
    before = [tensor.data_ptr() for tensor in trees.of(out.hidden_states, 2).tensors()]
    monkeypatch.setattr(draft_graph, "is_capturing", lambda device: True)
    out.hidden_states.copy_(torch.randn(2 * DRAFT, VOCABULARY))
    trees.record(None, out, batch, 2 * DRAFT)
    built = trees.of(out.hidden_states, 2)
    assert [tensor.data_ptr() for tensor in built.tensors()] == before
    assert torch.equal(built.candidate_tokens, drafted(out.hidden_states)[0])


@pytest.mark.parametrize("device", DEVICES)
def test_a_recorded_tree_is_the_tree(device: str) -> None:
    trees = RecordedTrees(drafted, lambda tree: tree.scores.exp().sum(1, keepdim=True), width=9)
    batches, graphs = {}, {}
    for count in (4, 2):
        batch = SimpleNamespace(
            batch_size=count,
            input_ids=torch.zeros(count * DRAFT, dtype=torch.int64, device=device),
            positions=torch.zeros(count * DRAFT, dtype=torch.int64, device=device),
        )
        out = SimpleNamespace(hidden_states=torch.zeros(count * DRAFT, VOCABULARY, device=device))
        trees.record(None, out, batch, count * DRAFT)
        if device == "cuda":
            graphs[count] = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graphs[count]):
                trees.record(None, out, batch, count * DRAFT)
        batches[count] = batch, out.hidden_states
    generator = torch.Generator().manual_seed(3)
    for requests, count in ((4, 4), (2, 2), (3, 4), (1, 2), (4, 4)):
        batch, hidden = batches[count]
        live = torch.randn(requests, DRAFT, VOCABULARY, generator=generator).to(device)
        ids = torch.randint(VOCABULARY, (requests, DRAFT), generator=generator).to(device)
        lens = torch.randint(90, (requests,), generator=generator).to(device)
        hidden.view(count, DRAFT, -1)[:requests] = live
        batch.input_ids.view(count, DRAFT)[:requests] = ids
        positions = lens[:, None] + torch.arange(DRAFT, device=device)
        batch.positions.view(count, DRAFT)[:requests] = positions
        if device == "cuda":
            graphs[count].replay()
        else:
            trees.record(None, SimpleNamespace(hidden_states=hidden), batch, count * DRAFT)
        built = trees.of(hidden[: requests * DRAFT], requests)
        expected = build_token_tree(ids[:, 0], *drafted(live), 9, lens)
        for name, value in vars(expected).items():
            assert torch.equal(getattr(built.tree, name), value), name
        assert torch.equal(built.candidate_tokens, drafted(live)[0])
        told = built.expectation()
        torch.testing.assert_close(told, expected.scores.exp().sum(1, keepdim=True))
        assert told.data_ptr() != built.expected.data_ptr(), (
            "the next replay writes what the host may still read"
        )
    assert trees.of(hidden.clone(), 4) is None, "hidden states of no graph"
    assert trees.of(hidden, 5) is None, "more requests than any graph has"
