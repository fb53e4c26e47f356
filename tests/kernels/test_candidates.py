"""kernels/tree/candidates.py: the best tokens of a row of logits, by the kernels as in plain PyTorch."""

from types import SimpleNamespace

import pytest
import torch

from sglang_ddtree_patch.kernels.tree.candidates import top_log_probs, top_log_probs_torch
from sglang_ddtree_patch.kernels.tree.candidates_kernel import top_log_probs_triton

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def random_logits(seed: int, rows: int, vocabulary: int, kind: str) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(rows, vocabulary, generator=generator)
    if kind == "bfloat16":
        return logits.bfloat16()
    if kind == "tied":  # both zeros among them
        return logits.round().clamp(-1, 1) * torch.where(torch.arange(vocabulary) % 2 == 0, 1.0, -1.0)
    if kind == "mostly -inf":
        return torch.where(torch.rand(logits.shape, generator=generator) < 0.9, -torch.inf, logits)
    return logits


def assert_same_candidates(logits: torch.Tensor, count: int) -> None:
    tokens, log_probs = top_log_probs_torch(logits, count)
    our_tokens, our_log_probs = top_log_probs_triton(logits, count)
    assert torch.equal(our_tokens, tokens)
    # One order of summation and another: nothing but rounding.
    torch.testing.assert_close(our_log_probs, log_probs, rtol=1e-5, atol=1e-5, equal_nan=True)
    assert (our_log_probs.diff(dim=1).nan_to_num(0) <= 0).all()


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "tied", "mostly -inf"])
@pytest.mark.parametrize(
    ("vocabulary", "count"), [(1, 1), (5, 5), (500, 8), (3000, 1), (2500, 33), (9000, 8)]
)
def test_candidates_are_the_best_tokens_in_order_smaller_token_first(vocabulary, count, kind):
    assert_same_candidates(random_logits(vocabulary, 2, vocabulary, kind).to(DEVICE), count)


def test_log_probs_are_those_of_the_whole_row():
    logits = random_logits(1, 2, 5000, "float32").to(DEVICE)  # five tiles
    tokens, log_probs = top_log_probs_triton(logits, 8)
    torch.testing.assert_close(log_probs, logits.log_softmax(-1).gather(1, tokens), rtol=1e-5, atol=1e-5)


def test_rows_may_be_a_view_of_wider_ones():
    wider = random_logits(2, 3, 640, "float32").to(DEVICE)
    assert_same_candidates(wider[:, :500], 8)


def test_a_nan_anywhere_leaves_a_row_without_a_possible_candidate():
    logits = random_logits(3, 3, 2000, "float32")
    logits[1, 1500] = torch.nan
    _, log_probs = top_log_probs_triton(logits.to(DEVICE), 8)
    assert log_probs.isnan().all(1).tolist() == [False, True, False]
    assert top_log_probs_torch(logits, 8)[1].isnan().all(1).tolist() == [False, True, False]


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["float32", "bfloat16", "tied", "mostly -inf"])
@pytest.mark.parametrize("count", [1, 8, 17, 64])
def test_a_whole_vocabulary_on_the_gpu(count, kind):
    for rows, vocabulary in ((15, 151936), (480, 32001)):
        logits = random_logits(rows, rows, vocabulary, kind).cuda()
        assert_same_candidates(logits, count)
        assert torch.equal(top_log_probs(logits, count)[0], top_log_probs_triton(logits, count)[0])


def plain_head(vocabulary: int, padding: int) -> SimpleNamespace:
    """A head on one device: rows of `padding` behind the vocabulary, which no candidate may come from."""
    generator = torch.Generator().manual_seed(4)
    weight = torch.randn(vocabulary + padding, 16, generator=generator)
    weight[vocabulary:] = 100.0
    return SimpleNamespace(weight=weight, org_vocab_size=vocabulary, quant_method=None)


def test_our_path_through_the_head_gives_sglangs_candidates(monkeypatch):
    from sglang.srt.models import dflash

    from sglang_ddtree_patch.round import draft_step

    for module in (dflash, draft_step):
        monkeypatch.setattr(module, "get_parallel", lambda: SimpleNamespace(tp_size=1))
    head, hidden = plain_head(300, 20), torch.rand(7, 16)
    tokens, log_probs = draft_step.head_candidates(hidden, head, 8)
    monkeypatch.setattr(draft_step, "has_kernels", lambda device: True)
    monkeypatch.setattr(draft_step, "candidate_topk", None)
    our_tokens, our_log_probs = draft_step.head_candidates(hidden, head, 8)
    assert torch.equal(our_tokens, tokens)
    assert our_tokens.max() < 300
    torch.testing.assert_close(our_log_probs, log_probs)


@pytest.mark.parametrize(
    ("weight", "quant_method", "tp_size"),
    [
        (torch.zeros(4, 4), None, 2),
        (torch.zeros(4, 4, dtype=torch.float8_e4m3fn), None, 1),
        (torch.zeros(4, 4), SimpleNamespace(apply=print), 1),
    ],
    ids=["sharded", "float8", "quantized"],
)
def test_other_heads_take_sglangs_path(monkeypatch, weight, quant_method, tp_size):
    from sglang_ddtree_patch.round import draft_step

    monkeypatch.setattr(draft_step, "get_parallel", lambda: SimpleNamespace(tp_size=tp_size))
    monkeypatch.setattr(draft_step, "has_kernels", lambda device: True)
    asked = []

    def candidate_topk(hidden, head, count, with_partition):
        asked.append((head, count, with_partition))
        return torch.tensor([[3, 1]]), torch.tensor([[-1.0, -2.0]]), torch.tensor([0.5])

    monkeypatch.setattr(draft_step, "candidate_topk", candidate_topk)
    head = SimpleNamespace(weight=weight, org_vocab_size=4, quant_method=quant_method)
    tokens, log_probs = draft_step.head_candidates(torch.zeros(1, 4), head, 2)
    assert asked == [(head, 2, True)]
    assert (tokens.tolist(), log_probs.tolist()) == ([[3, 1]], [[-1.5, -2.5]])
