"""A target of a few tokens whose every distribution is known, decoded by tree rounds with SGLang's sampler.

The next token depends on the last two, so that a row's logits need its whole branch and not just itself.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from unittest import mock

import torch
from sglang.srt.layers import sampler
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.runtime_context import get_context, get_parallel
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo
from sglang.srt.sampling.sampling_params import TOP_K_ALL

from sglang_ddtree_patch.cpu.hooks import murmur_hash32
from sglang_ddtree_patch.kernels.accept.walk import accept_greedy
from sglang_ddtree_patch.kernels.tree.build import TokenTree, build_token_tree
from sglang_ddtree_patch.round.target_choice import choose_tokens

VOCABULARY = 6
DEPTHS = 3
FIRST_ROOT, BEFORE_ROOT = 2, 4
PROMPT = 7  # position of the first root


@contextmanager
def stock_runtime() -> Iterator[None]:
    """What SGLang's sampler asks of its surroundings: the PyTorch backend, one rank."""
    group = SimpleNamespace(device_group=None)
    # On a GPU stock's own kernel hashes, and Inductor cannot compile what stands for it on a CPU.
    hash_of_stock = sampler.murmur_hash32 if torch.cuda.is_available() else murmur_hash32
    with (
        mock.patch.object(sampler, "murmur_hash32", hash_of_stock),
        get_context().override_server_args(sampling_backend="pytorch"),
        get_parallel().override(tp_group=group),
    ):
        yield


@dataclass(frozen=True)
class Rule:
    """A request's sampling parameters; top-k 1 is greedy, as SGLang has it."""

    temperature: float = 1.0
    top_k: int = TOP_K_ALL
    top_p: float = 1.0
    min_p: float = 0.0


def sampling_info(rules: list[Rule], seeds: torch.Tensor | None = None) -> SamplingBatchInfo:
    """The batch of requests as SGLang's `from_schedule_batch` describes it."""
    return SamplingBatchInfo(
        temperatures=torch.tensor([[rule.temperature] for rule in rules]),
        top_ps=torch.tensor([rule.top_p for rule in rules]),
        top_ks=torch.tensor([rule.top_k for rule in rules], dtype=torch.int32),
        min_ps=torch.tensor([rule.min_p for rule in rules]),
        is_all_greedy=all(rule.top_k <= 1 for rule in rules),
        is_any_greedy=any(rule.top_k <= 1 for rule in rules),
        need_top_p_sampling=any(rule.top_p != 1.0 for rule in rules),
        need_top_k_sampling=any(rule.top_k != TOP_K_ALL for rule in rules),
        need_min_p_sampling=any(rule.min_p > 0 for rule in rules),
        vocab_size=VOCABULARY,
        sampling_seed=seeds,
        device="cpu",
    )


def target_logits(seed: int = 0) -> torch.Tensor:
    """[token before last, last token, next token]; the last token of the vocabulary never follows."""
    logits = 1.5 * torch.randn(
        VOCABULARY, VOCABULARY, VOCABULARY, generator=torch.Generator().manual_seed(seed)
    )
    logits[:, :, -1] = -torch.inf
    return logits


def exact(logits: torch.Tensor, rule: Rule) -> torch.Tensor:
    """The distribution of one token by the definitions of the parameters: [vocabulary] float64."""
    probs = (logits.double() / rule.temperature).softmax(-1)
    order = sorted(range(len(probs)), key=lambda token: -probs[token])
    kept, mass = [], 0.0
    for rank, token in enumerate(order):
        if rank >= rule.top_k or mass > rule.top_p or probs[token] < rule.min_p * probs[order[0]]:
            break
        kept.append(token)
        mass += float(probs[token])
    filtered = torch.zeros_like(probs)
    filtered[kept] = probs[kept]
    return filtered / filtered.sum()


def exact_sequences(table: torch.Tensor, rule: Rule, length: int) -> torch.Tensor:
    """Probability of every sequence of `length` tokens behind the first root, in lexicographic order."""
    step = torch.stack([exact(logits, rule) for logits in table.flatten(0, 1)]).view(table.shape)
    result = []
    for sequence in itertools.product(range(VOCABULARY), repeat=length):
        tokens = (BEFORE_ROOT, FIRST_ROOT, *sequence)
        result.append(math.prod(float(step[tokens[i : i + 3]]) for i in range(length)))
    return torch.tensor(result, dtype=torch.float64)


Drafter = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def uniform(table: torch.Tensor, before: torch.Tensor, roots: torch.Tensor) -> torch.Tensor:
    """Half of the vocabulary at each position, chosen blindly. The same for all requests: over requests
    with candidates of their own, a bias towards candidates would average out."""
    blind = torch.rand(DEPTHS, VOCABULARY, generator=torch.Generator().manual_seed(1))
    return blind.argsort(-1)[None, :, :3].repeat(len(roots), 1, 1)


def always_wrong(table: torch.Tensor, before: torch.Tensor, roots: torch.Tensor) -> torch.Tensor:
    """The one token that the target never says, at every position."""
    return torch.full((len(roots), DEPTHS, 1), VOCABULARY - 1)


def always_right(table: torch.Tensor, before: torch.Tensor, roots: torch.Tensor) -> torch.Tensor:
    """Every token that the target may say, the likely ones first."""
    return table[before, roots].argsort(-1, descending=True)[:, None, :-1].repeat(1, DEPTHS, 1)


DRAFTERS = {drafter.__name__: drafter for drafter in (uniform, always_wrong, always_right)}


def draft_tree(drafter: Drafter, table: torch.Tensor, before: torch.Tensor, roots: torch.Tensor, width: int):
    tokens = drafter(table, before, roots)
    log_probs = torch.linspace(-0.5, -2.0, tokens.shape[2]).expand(tokens.shape)
    return build_token_tree(roots, tokens, log_probs, width)


def row_logits(table: torch.Tensor, tree: TokenTree, before: torch.Tensor) -> torch.Tensor:
    """What the target's forward over the block gives: [batch * width, vocabulary]."""
    above = tree.tokens.gather(1, tree.parents.clamp(min=0))
    above = torch.where(tree.depths == 0, before[:, None], above)
    return table[above, tree.tokens].flatten(0, 1)


def decode_by_trees(
    sampler: torch.nn.Module,
    info: SamplingBatchInfo,
    table: torch.Tensor,
    drafter: Drafter,
    length: int,
    width: int = 8,
    choose: Callable = choose_tokens,
) -> torch.Tensor:
    """The first `length` tokens of every request, by as many tree rounds as that takes."""
    batch = len(info)
    before = torch.full((batch,), BEFORE_ROOT)
    roots = torch.full((batch,), FIRST_ROOT)
    prefix_lens = torch.full((batch,), PROMPT)
    path = min(width, DEPTHS + 1)
    out = torch.zeros(batch, length + path, dtype=torch.int64)
    done = torch.zeros(batch, dtype=torch.int64)
    while int(done.min()) < length:
        tree = draft_tree(drafter, table, before, roots, width)
        logits = LogitsProcessorOutput(next_token_logits=row_logits(table, tree, before))
        predictions = choose(sampler, logits, info, tree, prefix_lens, keep_logits=False)
        accepted = accept_greedy(tree.tokens, tree.parents, predictions.view(batch, width), path)
        lengths = accepted.commit_lengths.long()
        for column in range(path):
            where = torch.minimum(done + column, torch.tensor(out.shape[1] - 1))
            keep = (column < lengths) & (done < length)
            rows = torch.arange(batch)
            out[rows, where] = torch.where(keep, accepted.tokens[:, column], out[rows, where])
        committed = torch.cat([roots[:, None], accepted.tokens], 1)
        before = committed.gather(1, (lengths - 1)[:, None]).squeeze(1)
        roots = accepted.bonus_tokens
        prefix_lens = prefix_lens + lengths
        done = torch.where(done < length, done + lengths, done)
    return out[:, :length]


def decode_plainly(
    sampler: torch.nn.Module, info: SamplingBatchInfo, table: torch.Tensor, length: int
) -> torch.Tensor:
    """The same without a tree: one token a step, as SGLang decodes."""
    batch = len(info)
    before, last = torch.full((batch,), BEFORE_ROOT), torch.full((batch,), FIRST_ROOT)
    out = []
    for step in range(length):
        logits = LogitsProcessorOutput(next_token_logits=table[before, last])
        positions = torch.full((batch,), PROMPT + step)
        before, last = last, sampler(logits, info, False, [], [], positions).long()
        out.append(last)
    return torch.stack(out, 1)


def chi_square_p(sequences: torch.Tensor, probabilities: torch.Tensor) -> float:
    """How likely counts at least this far from the expected ones are. Rare sequences count as one."""
    counts = torch.zeros_like(probabilities)
    index = torch.zeros(len(sequences), dtype=torch.int64)
    for column in sequences.T:
        index = index * VOCABULARY + column
    counts.index_add_(0, index, torch.ones(len(index), dtype=torch.float64))
    if counts[probabilities == 0].any():
        return 0.0
    expected = probabilities * len(sequences)
    rare = expected < 10
    counts = torch.cat([counts[~rare], counts[rare].sum(0, keepdim=True)])
    expected = torch.cat([expected[~rare], expected[rare].sum(0, keepdim=True)])
    counts, expected = counts[expected > 0], expected[expected > 0]
    statistic = ((counts - expected) ** 2 / expected).sum()
    if len(expected) == 1:
        return 1.0
    return float(torch.special.gammaincc(torch.tensor((len(expected) - 1) / 2).double(), statistic / 2))
