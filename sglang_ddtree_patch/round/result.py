"""What a round leaves for the scheduler, and what is done with it once it has reached the host.

SGLang copies a round's result to the host beside the next round's forward and works through it when it is
there. What we want to know of a round travels with it, so that nothing waits on our account.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from sglang.srt.managers.utils import GenerationBatchResult
from sglang.srt.utils.common import async_d2h

from sglang_ddtree_patch.metrics.round_metrics import metrics_beside
from sglang_ddtree_patch.metrics.round_times import RoundTimes, Untimed
from sglang_ddtree_patch.widths.choice import ChosenWidth, FixedWidth


@dataclass(kw_only=True)
class RoundResult(GenerationBatchResult):
    """SGLang's result of a decode batch, and how the round went."""

    width: int  # rows of the verify block
    node_counts: torch.Tensor | None  # [batch] int64: rows that are nodes; None where nobody asks
    times: RoundTimes | Untimed
    context: int  # tokens of all prefixes, or a bound of them
    # [batch, widths] float32, accept lengths to expect of the widths to choose from; on the host once copied
    expected: torch.Tensor | None
    choice: ChosenWidth | FixedWidth  # what the round is told to

    def copy_to_cpu(self, *args: Any, **kwargs: Any) -> None:
        """Queue the copies; the parent's last one is followed by the event that says they are there."""
        if self.node_counts is not None:
            self.node_counts = async_d2h(self.node_counts)
        if self.expected is not None:
            self.expected = async_d2h(self.expected)
        super().copy_to_cpu(*args, **kwargs)


def settle_round(tokens: list[list[int]], processor: Any, result: Any, batch: Any) -> None:
    """After `_resolve_spec_v2_tokens`, with which SGLang begins to work through a speculative result.

    Args:
        tokens: what it returns, and still does.
        processor: SGLang's SchedulerBatchResultProcessor.
        result: of any algorithm; ours are looked at.
        batch: the ScheduleBatch it is the result of.
    """
    if not isinstance(result, RoundResult):
        return
    result.choice.learn(
        result.width,
        result.context,
        result.num_correct_drafts_per_req_cpu,
        result.expected,
        result.times.step_seconds(),
    )
    if result.node_counts is None or not processor.metrics_reporter.current_scheduler_metrics_enabled:
        return
    # The same requests that SGLang counts: under overlap scheduling one that has ended takes part once more.
    counted = [i for i, req in enumerate(batch.reqs) if not (req.is_retracted or req.finished())]
    node_counts = result.node_counts.tolist()
    metrics_beside(processor.metrics_collector).count_round(
        width=result.width,
        accept_lengths=[result.num_correct_drafts_per_req_cpu[i] for i in counted],
        node_counts=[node_counts[i] for i in counted],
        seconds=result.times.seconds(),
    )
