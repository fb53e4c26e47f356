"""On a GPU no step of the target's choice waits for the device: PyTorch raises where one would."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import pytest
import torch
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.runtime_context import get_exec
from small_target import DRAFTERS, PROMPT, VOCABULARY, Rule, draft_tree, sampling_info, stock_runtime
from test_penalties import KINDS, Batch, Request

from sglang_ddtree_patch.kernels.tree.build import TokenTree
from sglang_ddtree_patch.round.target_choice import adjust_logits, choose_tokens
from sglang_ddtree_patch.sampling.grammar_tree import child_links
from sglang_ddtree_patch.sampling.penalty_history import PenaltyHistory
from sglang_ddtree_patch.sampling.seeded_sampler import SeededSampler

pytestmark = pytest.mark.gpu
WIDTH = 16
# Nearer to a model's than the six tokens that other tests make do with.
LARGE_VOCABULARY = 1024
RULES = [Rule(temperature=0.8), Rule(top_k=3), Rule(top_p=0.7), Rule(min_p=0.25), Rule(top_k=1)]


@pytest.fixture(autouse=True)
def waiting_raises() -> Iterator[None]:
    yield
    torch.cuda.set_sync_debug_mode("default")


def on_gpu(values):
    """A dataclass with its tensors on the GPU."""
    moved = {
        field.name: getattr(values, field.name).cuda()
        for field in dataclasses.fields(values)
        if isinstance(getattr(values, field.name), torch.Tensor)
    }
    return dataclasses.replace(values, **moved)


def tree_on_gpu(batch: int) -> TokenTree:
    table = torch.zeros(VOCABULARY, VOCABULARY, VOCABULARY)
    roots = torch.zeros(batch, dtype=torch.int64)
    return on_gpu(draft_tree(DRAFTERS["uniform"], table, roots, roots, WIDTH))


@pytest.mark.parametrize("backend", ["pytorch", "flashinfer"])
@pytest.mark.parametrize("seeds", [None, [3, 4, 5, 6, 7]], ids=["unseeded", "seeded"])
def test_drawing_a_token_for_every_row(backend: str, seeds: list[int] | None) -> None:
    info = sampling_info(RULES, None if seeds is None else torch.tensor(seeds))
    bias = torch.zeros(5, LARGE_VOCABULARY).cuda()
    info = dataclasses.replace(on_gpu(info), device="cuda", vocab_size=LARGE_VOCABULARY, logit_bias=bias)
    tree, prefix_lens = tree_on_gpu(5), torch.full((5,), PROMPT).cuda()
    with stock_runtime(), get_exec().kernel.override(sampling_backend=backend):
        sampler = SeededSampler()
        # The first round compiles and loads.
        for mode in ("default", "error"):
            logits = LogitsProcessorOutput(next_token_logits=torch.randn(5 * WIDTH, LARGE_VOCABULARY).cuda())
            torch.cuda.set_sync_debug_mode(mode)
            adjust_logits(logits.next_token_logits, info, tree, None, grammar_mask=None, longest=3)
            choose_tokens(sampler, logits, info, tree, prefix_lens, keep_logits=True)


def test_penalties_and_what_they_remember() -> None:
    requests = [Request(params) for params in KINDS.values()]
    batch, history = Batch(requests, [0] * len(requests)), PenaltyHistory(VOCABULARY, "cuda")
    batch.seq_lens = batch.seq_lens.cuda()
    added = batch.sampling_info.acc_additive_penalties[:, :VOCABULARY].cuda()
    batch.sampling_info = sampling_info([Rule()] * len(requests))
    batch.sampling_info.acc_additive_penalties = added
    tree = tree_on_gpu(len(requests))
    tokens, lengths = tree.tokens[:, :4], torch.ones(len(requests), dtype=torch.int32).cuda()
    history.begin(batch)
    for mode in ("default", "error"):
        logits = torch.randn(len(requests) * WIDTH, VOCABULARY).cuda()
        torch.cuda.set_sync_debug_mode(mode)
        history.record(batch, tokens, lengths)
        penalties = history.of(batch, batch.seq_lens + 1)
        adjust_logits(logits, batch.sampling_info, tree, penalties, grammar_mask=None, longest=3)


def test_the_links_of_the_tree_that_grammars_are_walked_on() -> None:
    tree = tree_on_gpu(3)
    torch.cuda.set_sync_debug_mode("error")
    child_links(tree.parents)
