"""What the ranks of a tensor-parallel group learn of their rounds: what the first one measured.

Every rank chooses the width of its own next round, and ranks that chose differently would wait in collectives
that do not match. Requests, contexts and tokens are the same on all of them; clocks are not. So what the
policy learns goes from the first rank to the others, over the group through which SGLang's schedulers share
requests, once in `EXCHANGED` rounds: every rank settles the same rounds in the same order.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import torch

from sglang_ddtree_patch.widths.policy import RoundSeen

EXCHANGED = 8


class Alone:
    """One rank: what it saw."""

    def agreed(self, seen: RoundSeen) -> Sequence[RoundSeen]:
        return (seen,)


class Together:
    """Several ranks: what the first saw, some rounds later."""

    def __init__(self, group: Any, first_rank: int):
        """
        Args:
            group: torch's ProcessGroup of the ranks, on the CPU.
            first_rank: global rank of its first.
        """
        self._group, self._first_rank = group, first_rank
        self._waiting: list[RoundSeen] = []

    def agreed(self, seen: RoundSeen) -> Sequence[RoundSeen]:
        """The rounds to learn from now, oldest first; the same on every rank."""
        self._waiting.append(seen)
        if len(self._waiting) < EXCHANGED:
            return ()
        waiting, self._waiting = self._waiting, []
        measured = torch.tensor([value for one in waiting for value in _measured(one)], dtype=torch.float64)
        torch.distributed.broadcast(measured, self._first_rank, group=self._group)
        values = iter(measured.tolist())
        return [_with_measured(one, [next(values) for _ in _measured(one)]) for one in waiting]


def ranks_of(group: Any) -> Alone | Together:
    """How the ranks of a tensor-parallel group (SGLang's GroupCoordinator) agree."""
    return Alone() if group.world_size == 1 else Together(group.cpu_group, group.first_rank)


def _measured(seen: RoundSeen) -> list[float]:
    return [math.nan if seen.seconds is None else seen.seconds, *(seen.expected or ())]


def _with_measured(seen: RoundSeen, values: list[float]) -> RoundSeen:
    seconds, *expected = values
    return dataclasses.replace(
        seen,
        seconds=None if math.isnan(seconds) else seconds,
        expected=None if seen.expected is None else expected,
    )
