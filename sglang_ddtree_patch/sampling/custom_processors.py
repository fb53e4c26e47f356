"""Custom logit processors on every branch.

A processor is Python code of the user's. It is handed logits and, as `custom_params["__req__"]`, the request,
whose `output_ids` it may read (SGLang's own thinking budgets and n-gram blocks do). So each row of the block
gets a view of its request that has said what the row's branch says. That takes the tree on the host, and the
tokens of the last round, which the scheduler may not have seen yet.

A processor that keeps state of its own between calls is not served right: it is called for every row.
"""

from __future__ import annotations

import dataclasses
import weakref
from typing import Any

import torch
from sglang.srt.layers.sampler import apply_custom_logit_processor
from sglang.srt.sampling.sampling_batch_info import ProcessorEntry, SamplingBatchInfo
from sglang.srt.utils.common import async_d2h

from sglang_ddtree_patch.kernels.tree.build import TokenTree

REQUEST = "__req__"


class RequestOnBranch:
    """A request as it would be if a branch of the tree had been said; everything else is the request's."""

    def __init__(self, request: Any, said: list[int]):
        self._request = request
        self.output_ids = type(request.output_ids)(request.output_ids.typecode, said)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._request, name)


@dataclasses.dataclass(frozen=True)
class _Committed:
    """The tokens a request was given last, on their way to the host."""

    tokens: torch.Tensor  # [any]
    length: torch.Tensor  # []: how many of them count


class CustomProcessors:
    """Applies a batch's processors row by row; remembers what requests have just said for the next round."""

    def __init__(self) -> None:
        self._latest: weakref.WeakKeyDictionary[Any, _Committed] = weakref.WeakKeyDictionary()

    def record(self, batch: Any, tokens: torch.Tensor, lengths: torch.Tensor) -> None:
        """Start copying what a batch has said: the first ``lengths`` [batch] of ``tokens`` [batch, any]."""
        if not batch.sampling_info.has_custom_logit_processor:
            return
        host_tokens, host_lengths = async_d2h(tokens), async_d2h(lengths)
        for index, request in enumerate(batch.reqs):
            if request.custom_logit_processor is not None:
                self._latest[request] = _Committed(host_tokens[index], host_lengths[index])

    def apply(self, batch: Any, logits: torch.Tensor, tree: TokenTree, prefix_lens: torch.Tensor) -> None:
        """Run the processors on the rows of their requests, in place. Waits for the device.

        Args:
            batch: SGLang's ScheduleBatch of the round.
            logits: [batch * width, vocabulary].
            tree: the block.
            prefix_lens: [batch] position of each root.
        """
        info = batch.sampling_info
        if not info.has_custom_logit_processor:
            return
        # One wait brings the last round's tokens too: their copies were started on this stream before.
        tokens, parents, roots = tree.tokens.tolist(), tree.parents.tolist(), prefix_lens.tolist()
        params: list[Any] = []
        for index, request in enumerate(batch.reqs):
            own = info.custom_params[index]
            # A client may write anything there for a request that has no processor.
            if request.custom_logit_processor is None or not isinstance(own, dict) or REQUEST not in own:
                params += [own] * tree.width
                continue
            said = self._said(request, roots[index] + 1 - len(request.origin_input_ids))
            branches = branches_of(tokens[index], parents[index])
            params += [{**own, REQUEST: RequestOnBranch(request, said + branch)} for branch in branches]
        apply_custom_logit_processor(logits, processors_by_row(info, params, tree.width))

    def _said(self, request: Any, count: int) -> list[int]:
        """The ``count`` tokens a request has said, root included."""
        said = list(request.output_ids[:count])
        missing = count - len(said)
        if missing:
            latest = self._latest[request]
            said += latest.tokens[: int(latest.length)][-missing:].tolist()
        return said


def branches_of(tokens: list[int], parents: list[int]) -> list[list[int]]:
    """The tokens of every row's branch behind the root; parents stand before children."""
    branches: list[list[int]] = []
    for token, parent in zip(tokens, parents, strict=True):
        branches.append([] if parent < 0 else [*branches[parent], token])
    return branches


def processors_by_row(info: SamplingBatchInfo, params: list[Any], width: int) -> SamplingBatchInfo:
    """A batch's processors with the rows of the block for its requests."""
    offsets = torch.arange(width, device=info.device)
    entries = {
        key: ProcessorEntry(
            processor=entry.processor,
            rows=[row * width + offset for row in entry.rows for offset in range(width)],
            indices=(entry.indices[:, None] * width + offsets).flatten(),
        )
        for key, entry in info.custom_logit_processor.items()
    }
    return dataclasses.replace(
        info,
        # By its first entries SGLang counts the rows.
        temperatures=info.temperatures.repeat_interleave(width, 0),
        custom_params=params,
        custom_logit_processor=entries,
    )
