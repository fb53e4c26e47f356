"""The steps' batches: texts drawn in epochs and gathered on the device, in shapes of which there are few.

Texts of nearly one length share a batch of S rows of T tokens with n blocks each. T is 2^k or 3 * 2^(k - 1),
S is a power of two, and S * n is the same in all of them, so S * T takes two values (and those of texts past
a step): whoever compiles for a shape compiles twice. Nothing waits for the host but an epoch's plan.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

SHORTEST_ROW = 128  # tokens


@dataclass(frozen=True)
class Plan:
    """A batch to come: texts int64 [S] on the device, T and n."""

    texts: torch.Tensor
    length: int
    blocks: int


@dataclass(frozen=True)
class Batch:
    texts: torch.Tensor  # int64 [S]
    ids: torch.Tensor  # int64 [S, T]; the last token is repeated past a text's end
    lengths: torch.Tensor  # int64 [S]
    anchors: torch.Tensor  # int64 [S, n]
    places: torch.Tensor  # int64 [S, T], where each token stands in Texts.tokens


class Texts:
    """All texts end to end on the device, in a random order that depends on the texts alone."""

    def __init__(self, texts: Sequence[tuple[int, list[int]]], device: str) -> None:
        order = torch.randperm(len(texts), generator=torch.Generator().manual_seed(0)).tolist()
        texts = [texts[index] for index in order]
        self.sizes = torch.tensor([len(ids) for _, ids in texts])  # int64 [texts], on the host
        self.ends = self.sizes.cumsum(0)  # the same
        self.row_lengths = [row_length(size) for size in self.sizes.tolist()]
        self.tokens = torch.cat([torch.tensor(ids) for _, ids in texts]).to(device)  # int64 [tokens]
        self.begins = (self.ends - self.sizes).to(device)  # int64 [texts]
        self.lengths = self.sizes.to(device)  # int64 [texts]
        self.firsts = torch.tensor([first for first, _ in texts], device=device)  # int64 [texts]
        self.device = device

    def __len__(self) -> int:
        return len(self.sizes)

    def gather(self, plan: Plan) -> Batch:
        """Anchors lie in the answers alone, where a server drafts, spread evenly, with a token after each."""
        lengths, firsts = self.lengths[plan.texts], self.firsts[plan.texts]
        columns = torch.minimum(torch.arange(plan.length, device=self.device), lengths[:, None] - 1)
        places = self.begins[plan.texts][:, None] + columns
        choices = lengths - 1 - firsts  # at least one
        spread = torch.arange(plan.blocks, device=self.device) + torch.rand(
            len(plan.texts), plan.blocks, device=self.device
        )
        share = (spread / plan.blocks * choices[:, None]).long()
        anchors = firsts[:, None] + torch.minimum(share, choices[:, None] - 1)
        return Batch(plan.texts, self.tokens[places], lengths, anchors, places)


def row_length(size: int) -> int:
    """The least T that holds a text."""
    length = SHORTEST_ROW
    while length < size:
        length = length * 3 // 2 if length & (length - 1) == 0 else length // 3 * 4
    return length


def shape(length: int, step_tokens: int, step_blocks: int) -> tuple[int, int]:
    """S and n for T: as many rows as a step's tokens and blocks allow; the blocks are dealt out to them."""
    rows = 1 << (max(1, min(step_tokens // length, step_blocks)).bit_length() - 1)
    return rows, max(1, min(step_blocks // rows, length))


def plan_epoch(
    row_lengths: Sequence[int], members: torch.Tensor, step_tokens: int, step_blocks: int, device: str
) -> list[Plan]:
    """Each of `members` (indices into `row_lengths`) once, in batches of random order and company.

    Those that fill no batch of their length join the next longer ones; the last batch, of the longest, is
    filled up with texts that come twice.
    """
    by_length: dict[int, list[int]] = {}
    for index in members[torch.randperm(len(members))].tolist():
        by_length.setdefault(row_lengths[index], []).append(index)
    chosen: list[tuple[list[int], int, int]] = []
    left: list[int] = []
    for length in sorted(by_length):
        waiting = left + by_length[length]
        rows, blocks = shape(length, step_tokens, step_blocks)
        whole = len(waiting) - len(waiting) % rows
        chosen += [(waiting[start : start + rows], length, blocks) for start in range(0, whole, rows)]
        left = waiting[whole:]
    if left:
        more = members[torch.randint(0, len(members), (rows - len(left),))].tolist()
        chosen.append((left + more, length, blocks))
    indices = torch.tensor([index for texts, _, _ in chosen for index in texts]).to(device)
    parts = indices.split([len(texts) for texts, _, _ in chosen])
    return [Plan(part, length, blocks) for part, (_, length, blocks) in zip(parts, chosen, strict=True)]


def endless(texts: Texts, kept: int, step_tokens: int, step_blocks: int) -> Iterator[tuple[Plan, bool]]:
    """Epoch after epoch, and whether a batch's texts are all among the first `kept`: none is mixed."""
    groups = [(torch.arange(kept), True), (torch.arange(kept, len(texts)), False)]
    while True:
        plans = [
            (plan, is_kept)
            for members, is_kept in groups
            if len(members)
            for plan in plan_epoch(texts.row_lengths, members, step_tokens, step_blocks, texts.device)
        ]
        for index in torch.randperm(len(plans)).tolist():
            yield plans[index]
