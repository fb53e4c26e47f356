"""What every penalized request has said so far, kept on the device.

SGLang's own penalizers are fed by the scheduler, one token a step, from the host. A tree round commits
several tokens that the host learns of a round later, so the counts live here, are added to in the round that
commits, and are read in the next one without leaving the device.
"""

from __future__ import annotations

import dataclasses
import weakref
from typing import Any

import torch
from sglang.srt.utils.common import async_h2d

from sglang_ddtree_patch.kernels.penalties import Penalties


def is_penalized(request: Any) -> bool:
    """Whether what a request has said changes what it says next."""
    params = request.sampling_params
    return (
        params.frequency_penalty != 0.0
        or params.presence_penalty != 0.0
        or params.repetition_penalty != 1.0
        or params.min_new_tokens > 0
    )


class PenaltyHistory:
    """Token counts of the penalized requests that are alive, a row each.

    Row 0 stays zero and stands for every other request. Rows are found by request, not by batch position,
    and come back when a request has finished, kept by a session or not, so nobody has to say that it ended.
    """

    def __init__(self, vocab_size: int, device: torch.device | str):
        self._counts = torch.zeros((1, vocab_size), dtype=torch.int32, device=device)
        self._rows: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()

    def begin(self, batch: Any) -> None:
        """Start the histories of a prefill batch; one retracted in mid-answer starts with what it has said.

        The prefill's own token is penalized by stock SGLang, as for a request that has said nothing, which
        is put right where it is not so.
        """
        requests = [request for request in batch.reqs if is_penalized(request)]
        if not requests:
            return
        for request in requests:
            self._assign_row(request)
        device = self._counts.device
        rows = async_h2d([self._rows[request] for request in requests], dtype=torch.int64, device=device)
        self._counts.index_fill_(0, rows, 0)
        said = [(self._rows[request], token) for request in requests for token in request.output_ids]
        if said:
            rows_of_said, tokens = async_h2d(said, dtype=torch.int64, device=device).T
            self._add(rows_of_said, tokens, rows.new_ones(len(said)))
            penalties = self._penalties(batch, batch.seq_lens)
            batch.sampling_info = dataclasses.replace(
                batch.sampling_info,
                acc_additive_penalties=penalties.additive(),
                acc_scaling_penalties=penalties.scaling(),
            )

    def record(self, batch: Any, tokens: torch.Tensor, lengths: torch.Tensor) -> None:
        """Count what a batch has just said: the first ``lengths`` [batch] of ``tokens`` [batch, any]."""
        if not any(is_penalized(request) for request in batch.reqs):
            return
        rows = self._rows_of(batch)[:, None].expand_as(tokens)
        is_said = torch.arange(tokens.shape[1], device=tokens.device) < lengths[:, None]
        self._add(rows.flatten(), tokens.flatten(), (is_said & (rows > 0)).flatten())

    def of(self, batch: Any, lengths: torch.Tensor) -> Penalties | None:
        """The penalties of a batch, None if it has none.

        Args:
            batch: SGLang's ScheduleBatch in a forward.
            lengths: [batch] tokens of each request, prompt and root included.
        """
        if not any(is_penalized(request) for request in batch.reqs):
            return None
        return self._penalties(batch, lengths)

    def _penalties(self, batch: Any, lengths: torch.Tensor) -> Penalties:
        requests = batch.reqs
        device, params = self._counts.device, [request.sampling_params for request in requests]
        strengths = async_h2d(
            [(p.frequency_penalty, p.presence_penalty, p.repetition_penalty) for p in params],
            dtype=torch.float32,
            device=device,
        )
        numbers = async_h2d(
            [(p.min_new_tokens, len(r.origin_input_ids)) for p, r in zip(params, requests, strict=True)],
            dtype=torch.int64,
            device=device,
        )
        # SGLang's penalizers are fed nothing here, so what they add is the stop tokens of requests that
        # wait for `min_new_tokens`.
        waits = any(p.min_new_tokens > 0 for p in params)
        return Penalties(
            counts=self._counts[self._rows_of(batch)],
            said=lengths - numbers[:, 1],
            frequency=strengths[:, 0],
            presence=strengths[:, 1],
            repetition=strengths[:, 2],
            min_new_tokens=numbers[:, 0],
            stop_tokens=batch.sampling_info.acc_additive_penalties if waits else None,
        )

    def _rows_of(self, batch: Any) -> torch.Tensor:
        rows = [self._rows.get(request, 0) for request in batch.reqs]
        return async_h2d(rows, dtype=torch.int64, device=self._counts.device)

    def _assign_row(self, request: Any) -> None:
        if request in self._rows:
            return
        # The round that one which has just finished may still take part in is queued before this one.
        for finished in [other for other in self._rows if other.finished()]:
            del self._rows[finished]
        taken = set(self._rows.values())
        free = [row for row in range(1, len(self._counts)) if row not in taken]
        if not free:
            free = [len(self._counts)]
            self._counts = torch.cat([self._counts, torch.zeros_like(self._counts)])
        self._rows[request] = free[0]

    def _add(self, rows: torch.Tensor, tokens: torch.Tensor, times: torch.Tensor) -> None:
        places = rows * self._counts.shape[1] + tokens
        self._counts.view(-1).scatter_add_(0, places, times.to(torch.int32))
