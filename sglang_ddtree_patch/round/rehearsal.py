"""What runs once while the server starts, so that no round that is served compiles a kernel."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from sglang_ddtree_patch.kernels.accept.walk import accept_greedy
from sglang_ddtree_patch.kernels.tree.build import build_token_tree
from sglang_ddtree_patch.round.commit import TargetKVCommit
from sglang_ddtree_patch.round.draft_step import rehearse_head


def rehearse_small_steps(worker: Any, widths: Sequence[int]) -> None:
    """Run our own launches outside graphs once.

    One request of slot 0 and no prefix: slot 0 is nobody's, and all that is written lands there.

    Args:
        worker: the `DDTreeWorker`, with its models and pools.
        widths: that a round may take; the largest last.
    """
    sizes, nothing = worker.sizes, torch.zeros(1, dtype=torch.int64, device=worker.device)
    worker.plan_slots(request_ids=nothing, prefix_lens=nothing, host_lens=None, root_tokens=nothing)
    rehearse_head(worker, sizes)
    shape = (1, sizes.draft - 1, sizes.candidates)
    tree = build_token_tree(
        nothing, nothing.new_zeros(shape), torch.zeros(shape, device=worker.device), sizes.widest, nothing
    )
    # Not the round's own: the pool may still be resized.
    commit = TargetKVCommit(worker.target_worker.model_runner.token_to_kv_pool)
    for width in widths:
        block, path = tree.narrowed(width), sizes.of_width(width).path
        accepted = accept_greedy(block.tokens, block.parents, block.tokens, path, nothing)
        commit(nothing.new_zeros((1, sizes.slots)), accepted)
