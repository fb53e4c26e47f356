"""target_choice.py and seeded_sampler.py: the text is distributed as the target's own, whatever the tree.

Every comparison is with exact probabilities, or with SGLang's own sampler decoding without a tree.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch
from sglang.srt.environ import envs
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.layers.sampler import Sampler
from small_target import (
    BEFORE_ROOT,
    DRAFTERS,
    FIRST_ROOT,
    PROMPT,
    VOCABULARY,
    Rule,
    chi_square_p,
    decode_by_trees,
    decode_plainly,
    draft_tree,
    exact_sequences,
    row_logits,
    sampling_info,
    stock_runtime,
    target_logits,
)

from sglang_ddtree_patch.round.target_choice import adjust_logits, choose_tokens
from sglang_ddtree_patch.sampling.seeded_sampler import SeededSampler
from sglang_ddtree_patch.settings import UNSEEDED

DRAWS = 20_000
THRESHOLD = 1e-3
RULES = {
    "temperature": Rule(temperature=0.8),
    "hot": Rule(temperature=1.7),
    "top-k": Rule(top_k=3),
    "top-p": Rule(top_p=0.7),
    "min-p": Rule(min_p=0.25),
    "all": Rule(temperature=1.3, top_k=4, top_p=0.9, min_p=0.1),
}
GREEDY = Rule(top_k=1)


@pytest.fixture(autouse=True, scope="module")
def runtime():
    with stock_runtime():
        yield


@pytest.fixture(autouse=True)
def same_draws_every_time():
    torch.manual_seed(0)


def smallest_p(sequences: torch.Tensor, table: torch.Tensor, rule: Rule) -> float:
    """Of the first 1, 2 and 3 tokens, each jointly."""
    return min(
        chi_square_p(sequences[:, :length], exact_sequences(table, rule, length)) for length in (1, 2, 3)
    )


def is_distributed_as(rule: Rule, table: torch.Tensor, draw: Callable[[int], torch.Tensor]) -> bool:
    """Whether ``draw(n)``, the first tokens of n requests, looks like the target's own.

    Some seventy p-values are looked at in this file, so that one in fifteen choices of the random seed would
    bring one below the threshold by chance. Such a one is decided by five times as many draws, made afresh:
    chance does not repeat itself, and a bias shows the more.
    """
    if smallest_p(draw(DRAWS), table, rule) > THRESHOLD:
        return True
    return smallest_p(draw(5 * DRAWS), table, rule) > THRESHOLD


def by_trees(rule: Rule, table: torch.Tensor, drafter: Callable, **options) -> Callable[[int], torch.Tensor]:
    sampler = SeededSampler()
    return lambda count: decode_by_trees(sampler, sampling_info([rule] * count), table, drafter, 3, **options)


@pytest.mark.parametrize("drafter", DRAFTERS.values(), ids=DRAFTERS)
@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_the_next_tokens_are_distributed_as_the_targets_own(rule, drafter):
    table = target_logits()
    assert is_distributed_as(rule, table, by_trees(rule, table, drafter))


def test_the_yardstick_passes_stock_sampling_without_a_tree():
    table, rule = target_logits(), RULES["all"]

    def draw(count: int) -> torch.Tensor:
        return decode_plainly(Sampler(), sampling_info([rule] * count), table, 3)

    assert is_distributed_as(rule, table, draw)


def prefers_children(*args, **kwargs):
    """A biased rule: a row whose token is no child of it gets a second draw."""
    sampler, logits, info, tree, prefix_lens = args
    first = choose_tokens(sampler, copied(logits), info, tree, prefix_lens, **kwargs).view(tree.tokens.shape)
    second = choose_tokens(*args, **kwargs).view(tree.tokens.shape)
    rows = torch.arange(tree.width)
    is_child = (tree.parents[:, None, :] == rows[:, None]) & (tree.tokens[:, None, :] == first[:, :, None])
    return torch.where(is_child.any(-1), first, second).flatten()


def draws_once_for_all_rows(*args, **kwargs):
    """A dependent rule: every row of a request uses the noise of its root."""
    _, logits, info, tree, _ = args
    rows = logits.next_token_logits.view(len(info), tree.width, -1) / info.temperatures[:, None]
    return (rows.softmax(-1) / torch.rand(len(info), 1, VOCABULARY).log().neg()).argmax(-1).flatten()


def copied(logits: LogitsProcessorOutput) -> LogitsProcessorOutput:
    return dataclasses.replace(logits, next_token_logits=logits.next_token_logits.clone())


@pytest.mark.parametrize("rule", [prefers_children, draws_once_for_all_rows])
@pytest.mark.parametrize("drafter", ["uniform", "always_right"])
def test_the_yardstick_catches_a_biased_rule(rule, drafter):
    table, temperature = target_logits(), RULES["temperature"]
    draw = by_trees(temperature, table, DRAFTERS[drafter], choose=rule)
    assert not is_distributed_as(temperature, table, draw)


def test_rows_of_one_request_draw_independently():
    """Rows with one and the same distribution: pairs of draws are as likely as their product."""
    logits = torch.randn(VOCABULARY)
    info = sampling_info([RULES["temperature"]] * DRAWS)
    before, roots = torch.full((DRAWS,), BEFORE_ROOT), torch.full((DRAWS,), FIRST_ROOT)
    tree = draft_tree(DRAFTERS["uniform"], target_logits(), before, roots, width=2)
    rows = LogitsProcessorOutput(next_token_logits=logits.repeat(2 * DRAWS, 1))
    drawn = choose_tokens(SeededSampler(), rows, info, tree, torch.full((DRAWS,), PROMPT), keep_logits=False)
    single = (logits.double() / 0.8).softmax(-1)
    assert chi_square_p(drawn.view(DRAWS, 2), (single[:, None] * single).flatten()) > THRESHOLD


def test_greedy_and_sampled_requests_share_a_batch():
    table, drafter = target_logits(), DRAFTERS["always_right"]
    alone = decode_by_trees(SeededSampler(), sampling_info([GREEDY]), table, drafter, 3)
    for column, rule in ((1, RULES["hot"]), (2, RULES["top-p"])):

        def draw(count: int, column: int = column) -> torch.Tensor:
            info = sampling_info([GREEDY, RULES["hot"], RULES["top-p"]] * count)
            sequences = decode_by_trees(SeededSampler(), info, table, drafter, 3)
            assert (sequences[0::3] == alone).all()
            return sequences[column::3]

        assert is_distributed_as(rule, table, draw)


def test_a_greedy_request_takes_the_largest_logit_in_any_company():
    """Logits this near give the same probability, and sampling with top-k 1 would take the first of them."""
    table = torch.zeros(VOCABULARY, VOCABULARY, VOCABULARY)
    table[:, :, 3] = 1e-9
    for company in ([], [RULES["hot"]], [RULES["top-p"], RULES["min-p"]]):
        info = sampling_info([GREEDY, *company])
        assert decode_by_trees(SeededSampler(), info, table, DRAFTERS["uniform"], 3)[0].tolist() == [3, 3, 3]


# Seeds.


@pytest.mark.parametrize("width", [1, 4, 12, 33])
@pytest.mark.parametrize("drafter", DRAFTERS.values(), ids=DRAFTERS)
@pytest.mark.parametrize("rule", ["hot", "top-k", "top-p"])
def test_a_seeded_request_draws_what_stock_draws_by_that_seed_without_a_tree(rule, drafter, width):
    table, rule = target_logits(), RULES[rule]
    seeds = torch.tensor([0, 1, 42, -1, 2**40 + 3, 2**63 - 1] * 20)
    info = sampling_info([rule] * len(seeds), seeds)
    expected = decode_plainly(Sampler(), info, table, 12)
    assert torch.equal(decode_by_trees(SeededSampler(), info, table, drafter, 12, width), expected)
    assert torch.equal(decode_plainly(SeededSampler(), info, table, 12), expected)
    assert len(expected.unique(dim=0)) == 6


def test_a_seeded_request_draws_alike_in_any_company():
    table, drafter = target_logits(), DRAFTERS["uniform"]
    rule = RULES["hot"]
    alone = decode_by_trees(SeededSampler(), sampling_info([rule], torch.tensor([7])), table, drafter, 12)
    for company in ([GREEDY], [RULES["top-p"]], [RULES["min-p"], RULES["top-k"]]):
        seeds = torch.tensor([7] + [UNSEEDED] * len(company))
        info = sampling_info([rule, *company], seeds)
        assert torch.equal(decode_by_trees(SeededSampler(), info, table, drafter, 12)[:1], alone)


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_over_all_seeds_the_tokens_are_distributed_as_the_targets_own(rule):
    table = target_logits()
    next_seed = 0

    def draw(count: int) -> torch.Tensor:
        nonlocal next_seed
        seeds = torch.arange(next_seed, next_seed + count)
        next_seed += count
        info = sampling_info([rule] * count, seeds)
        return decode_by_trees(SeededSampler(), info, table, DRAFTERS["uniform"], 3)

    assert is_distributed_as(rule, table, draw)


def test_requests_without_a_seed_beside_seeded_ones_are_still_random():
    table, rule = target_logits(), RULES["all"]

    def draw(count: int) -> torch.Tensor:
        info = sampling_info([rule, rule] * count, torch.tensor([UNSEEDED, 5] * count))
        sequences = decode_by_trees(SeededSampler(), info, table, DRAFTERS["always_right"], 3)
        assert len(sequences[1::2].unique(dim=0)) == 1
        return sequences[::2]

    assert is_distributed_as(rule, table, draw)


# What log-probs are computed from.


@pytest.mark.parametrize("rules", [[GREEDY, GREEDY], [RULES["hot"], GREEDY]], ids=["greedy", "mixed"])
def test_logits_that_are_read_again_hold_the_bias_and_nothing_else(rules):
    table = target_logits()
    before, roots = torch.full((2,), BEFORE_ROOT), torch.full((2,), FIRST_ROOT)
    tree = draft_tree(DRAFTERS["always_right"], table, before, roots, 8)
    bias = torch.randn(2, VOCABULARY)
    info = dataclasses.replace(sampling_info(rules), logit_bias=bias)
    plain = row_logits(table, tree, before)
    logits = LogitsProcessorOutput(next_token_logits=plain.clone())
    adjust_logits(logits.next_token_logits, info, tree, penalties=None, grammar_mask=None, longest=3)
    choose_tokens(SeededSampler(), logits, info, tree, torch.tensor([PROMPT, PROMPT]), keep_logits=True)
    assert torch.equal(logits.next_token_logits, plain + bias.repeat_interleave(8, 0))


@pytest.mark.parametrize("rules", [[GREEDY, GREEDY], [RULES["hot"], GREEDY]], ids=["greedy", "mixed"])
def test_nan_logits_are_sanitized_where_stock_is_told_to(rules):
    """Row by row, as SGLang's sampler does without a tree: NaN is never the largest."""
    table = target_logits()
    before, roots = torch.full((2,), BEFORE_ROOT), torch.full((2,), FIRST_ROOT)
    tree = draft_tree(DRAFTERS["always_right"], table, before, roots, 8)
    broken = row_logits(table, tree, before)
    greedy_rows = slice(8, 16)
    expected = broken[greedy_rows].clone().argmax(-1)
    broken[greedy_rows].scatter_(1, ((expected + 1) % VOCABULARY)[:, None], torch.nan)
    logits = LogitsProcessorOutput(next_token_logits=broken)
    prefix_lens = torch.tensor([PROMPT, PROMPT])
    with envs.SGLANG_SANITIZE_NAN_LOGITS.override(True):
        chosen = choose_tokens(
            SeededSampler(), logits, sampling_info(rules), tree, prefix_lens, keep_logits=False
        )
    assert torch.equal(chosen[greedy_rows], expected)
