"""kernels/penalties.py and penalty_history.py against SGLang's own penalizers, fed token by token."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from types import SimpleNamespace

import pytest
import torch
from random_trees import branch, random_tree
from sglang.srt.sampling import penaltylib

from sglang_ddtree_patch.kernels.penalties import Penalties, branch_tokens, penalize_rows
from sglang_ddtree_patch.kernels.tree.build import TokenTree, unpack_masks
from sglang_ddtree_patch.sampling.penalty_history import PenaltyHistory, is_penalized

VOCABULARY = 12
STOP_TOKENS = {3, 7}
PENALIZERS = {
    penaltylib.BatchedFrequencyPenalizer,
    penaltylib.BatchedMinNewTokensPenalizer,
    penaltylib.BatchedPresencePenalizer,
    penaltylib.BatchedRepetitionPenalizer,
}


def parameters(frequency=0.0, presence=0.0, repetition=1.0, min_new_tokens=0) -> SimpleNamespace:
    return SimpleNamespace(
        frequency_penalty=frequency, presence_penalty=presence, repetition_penalty=repetition,
        min_new_tokens=min_new_tokens, stop_token_ids=STOP_TOKENS,
    )  # fmt: skip


KINDS = {
    "none": parameters(),
    "frequency": parameters(frequency=0.3),
    "presence": parameters(presence=-0.7),
    "repetition": parameters(repetition=1.3),
    "rewarded": parameters(repetition=0.8, frequency=-0.2),
    "min_new_tokens": parameters(min_new_tokens=5),
    "all": parameters(0.4, 0.6, 1.5, 4),
}


@dataclass(eq=False)
class Request:
    """What penalizers read of SGLang's Req."""

    sampling_params: SimpleNamespace
    origin_input_ids: list[int] = field(default_factory=lambda: [1, 2, 3])
    output_ids: list[int] = field(default_factory=list)
    is_finished: bool = False
    eos_token_ids = None
    tokenizer = SimpleNamespace(additional_stop_token_ids=None, eos_token_id=None)

    def finished(self) -> bool:
        return self.is_finished


class Batch:
    """What they read of a ScheduleBatch: decode batches have their roots said."""

    def __init__(self, requests: list[Request], said: list[int]):
        self.reqs = requests
        self.device = "cpu"
        prompts = torch.tensor([len(request.origin_input_ids) for request in requests])
        self.seq_lens = prompts + torch.tensor(said)
        # As SGLang prepares a forward: penalizers that nothing was fed to.
        self.sampling_info = SamplingInfo(stock(self).accumulated())


@dataclass
class SamplingInfo:
    acc_additive_penalties: torch.Tensor
    acc_scaling_penalties: torch.Tensor | None = None


class stock:
    """SGLang's penalizers of a batch."""

    def __init__(self, batch):
        self._batch = batch  # penalizers hold it by a weak reference
        self.orchestrator = penaltylib.BatchedPenalizerOrchestrator(VOCABULARY, batch, PENALIZERS)

    def accumulated(self) -> torch.Tensor:
        added = torch.zeros(len(self._batch.reqs), VOCABULARY)
        self.orchestrator.accumulate_additive_penalties(added)
        return added


class Rows:
    """A batch of plain requests, one for each history."""

    def __init__(self, params: list[SimpleNamespace]):
        self.reqs = [Request(each) for each in params]
        self.device = "cpu"


def penalized_by_stock(
    logits: torch.Tensor, params: list[SimpleNamespace], said: list[list[int]]
) -> torch.Tensor:
    """`logits` [rows, vocabulary] after SGLang's penalizers have been fed each row's tokens."""
    out = []
    for row, each, tokens in zip(logits, params, said, strict=True):
        penalizers = stock(Rows([each])).orchestrator
        for token in tokens:
            penalizers.cumulate_output_tokens(torch.tensor([token]))
        added = row.clone()[None]
        penalizers.accumulate_additive_penalties(added)
        scaling = penalizers.accumulate_scaling_penalties()
        if scaling is not None:
            added = torch.where(added < 0, added * scaling, added / scaling)
        out.append(added[0])
    return torch.stack(out)


def repetitive_tree(batch: int, width: int, depths: int, seed: int) -> TokenTree:
    """Trees over few tokens, so that branches repeat themselves and what was said before."""
    roots = torch.randint(0, 6, (batch,), generator=torch.Generator().manual_seed(seed)).tolist()
    return random_tree(roots, width, vocabulary=6, candidates=4, seed=seed, depths=depths)


def histories(requests: list[Request], said: list[list[int]]) -> tuple[PenaltyHistory, Batch]:
    history = PenaltyHistory(VOCABULARY, "cpu")
    history.begin(Batch(requests, [0] * len(requests)))
    batch = Batch(requests, [len(tokens) for tokens in said])
    longest = max(len(tokens) for tokens in said)
    padded = torch.tensor([tokens + [0] * (longest - len(tokens)) for tokens in said])
    history.record(batch, padded, torch.tensor([len(tokens) for tokens in said]))
    return history, batch


@pytest.mark.parametrize(("width", "depths"), [(1, 3), (2, 1), (12, 3), (33, 5), (70, 7)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_row_is_penalized_for_its_own_branch(width, depths, dtype):
    requests = [Request(params) for params in KINDS.values()]
    tree = repetitive_tree(len(requests), width, depths, seed=width)
    # The root has been said already.
    generator = torch.Generator().manual_seed(depths)
    said = [
        [*torch.randint(0, 8, (n % 4,), generator=generator).tolist(), int(root)]
        for n, root in enumerate(tree.tokens[:, 0])
    ]
    history, batch = histories(requests, said)
    logits = torch.randn(len(requests) * width, VOCABULARY, generator=generator).to(dtype)
    logits[:, 5] = -torch.inf
    rows = [(index, row) for index in range(len(requests)) for row in range(width)]
    expected = penalized_by_stock(
        logits.clone(),
        [requests[index].sampling_params for index, _ in rows],
        [said[index] + branch(tree, index, row) for index, row in rows],
    )
    penalize_rows(logits, tree, history.of(batch, batch.seq_lens), longest=depths)
    assert logits.dtype == dtype
    assert torch.equal(logits.isinf(), expected.isinf())
    finite = ~logits.isinf()
    # A penalty that is added again and again is rounded again and again; ours is multiplied.
    tolerance = 1e-5 if dtype == torch.float32 else 2**-6
    found, wanted = logits[finite].float(), expected[finite].float()
    torch.testing.assert_close(found, wanted, atol=tolerance, rtol=tolerance)


def test_a_request_without_penalties_keeps_every_bit_beside_penalized_ones():
    requests = [Request(KINDS["none"]), Request(KINDS["all"])]
    tree = repetitive_tree(2, 12, 3, seed=0)
    history, batch = histories(requests, [[1, 1, 4], [2, 2]])
    logits = torch.randn(24, VOCABULARY)
    before = logits.clone()
    penalize_rows(logits, tree, history.of(batch, batch.seq_lens), longest=3)
    assert torch.equal(logits[:12], before[:12])
    assert not torch.equal(logits[12:], before[12:])


def test_a_branch_holds_what_its_row_sees_in_order():
    tree = repetitive_tree(5, 33, 5, seed=3)
    tokens, is_said = branch_tokens(tree, longest=5)
    for request in range(5):
        for row in range(33):
            assert tokens[request, row][is_said[request, row]].tolist() == branch(tree, request, row)
    assert unpack_masks(tree.masks).sum(-1).sub(1).equal(is_said.sum(-1))


# The history.


def counts(history: PenaltyHistory, request: Request) -> dict[int, int]:
    penalties = history.of(Batch([request], [1]), torch.tensor([4]))
    return {token: int(n) for token, n in enumerate(penalties.counts[0]) if n}


def test_requests_keep_their_counts_whatever_batch_they_are_in():
    first, second, other = (Request(KINDS[kind]) for kind in ("frequency", "all", "none"))
    history = PenaltyHistory(VOCABULARY, "cpu")
    history.begin(Batch([first], [0]))
    history.record(Batch([first], [0]), torch.tensor([[4]]), torch.tensor([1]))
    history.begin(Batch([other, second], [0, 0]))
    history.record(Batch([other, second], [0, 0]), torch.tensor([[9], [5]]), torch.ones(2))
    everyone = Batch([second, other, first], [1, 1, 1])
    history.record(everyone, torch.tensor([[1, 1, 2], [3, 3, 3], [4, 6, 6]]), torch.tensor([2, 3, 1]))
    assert counts(history, first) == {4: 2}
    assert counts(history, second) == {1: 2, 5: 1}
    shared = history.of(everyone, everyone.seq_lens)
    assert shared.counts[1].sum() == 0
    assert shared.said.tolist() == [1, 1, 1]
    assert history.of(Batch([other], [1]), torch.tensor([4])) is None


def test_a_request_that_is_gone_leaves_its_row_to_the_next_and_no_token():
    history = PenaltyHistory(VOCABULARY, "cpu")
    for round_ in range(20):
        requests = [Request(KINDS["presence"]) for _ in range(3)]
        history.begin(Batch(requests, [0, 0, 0]))
        assert counts(history, requests[2]) == {}
        history.record(Batch(requests, [0, 0, 0]), torch.tensor([[round_ % 12], [1], [2]]), torch.ones(3))
        del requests
    assert len(history._counts) == 4


def test_finished_requests_of_a_session_leave_their_rows_though_it_keeps_them():
    history, session = PenaltyHistory(VOCABULARY, "cpu"), []
    for turn in range(20):
        session.append(Request(KINDS["presence"]))
        history.begin(Batch([session[-1]], [0]))
        # Under overlap scheduling the last one takes part in a round more, which counts for nobody.
        batch = Batch([session[max(turn - 1, 0)], session[-1]], [0, 0])
        history.record(batch, torch.tensor([[3], [turn % 12]]), torch.tensor([min(turn, 1), 1]))
        assert counts(history, session[-1]) == {turn % 12: 1}
        session[-1].is_finished = True
    assert len(history._counts) == 2


def test_a_retracted_request_starts_again_from_what_it_has_said():
    request, company = Request(KINDS["all"]), Request(KINDS["none"])
    history = PenaltyHistory(VOCABULARY, "cpu")
    history.begin(Batch([request], [0]))
    # The eights were in flight and never arrived.
    history.record(Batch([request], [0]), torch.tensor([[4, 8, 8]]), torch.tensor([3]))
    request.output_ids = [4, 4, 9]
    batch = Batch([company, request], [0, 3])
    history.begin(batch)
    assert counts(history, request) == {4: 2, 9: 1}
    logits = torch.randn(2, VOCABULARY)
    params = [company.sampling_params, request.sampling_params]
    expected = penalized_by_stock(logits, params, [[], request.output_ids])
    added = logits + batch.sampling_info.acc_additive_penalties
    scaling = batch.sampling_info.acc_scaling_penalties
    torch.testing.assert_close(torch.where(added < 0, added * scaling, added / scaling), expected)


def test_a_fresh_prefill_is_left_to_stock():
    requests = [Request(KINDS["all"])]
    batch = Batch(requests, [0])
    before = replace(batch.sampling_info)
    PenaltyHistory(VOCABULARY, "cpu").begin(batch)
    assert batch.sampling_info.acc_additive_penalties is before.acc_additive_penalties


@pytest.mark.parametrize("kind", KINDS)
def test_what_counts_as_penalized(kind):
    assert is_penalized(Request(KINDS[kind])) == (kind != "none")


def test_penalties_may_leave_the_stop_tokens_out():
    penalties = Penalties(
        counts=torch.tensor([[0, 2]], dtype=torch.int32), said=torch.tensor([2]),
        frequency=torch.tensor([0.5]), presence=torch.tensor([1.0]), repetition=torch.tensor([2.0]),
        min_new_tokens=torch.tensor([0]), stop_tokens=None,
    )  # fmt: skip
    assert penalties.additive().tolist() == [[0.0, -2.0]]
    assert penalties.scaling().tolist() == [[1.0, 2.0]]
