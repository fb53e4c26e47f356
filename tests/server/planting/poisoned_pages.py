"""A test plugin that fills all that a request must not read with NaN, which shows in any sum it enters.

DDTREE_TEST_POISON   set: before each forward every free page, and after each round what it wrote past the
                     committed length, in the target's pool and in the drafter's
"""

from __future__ import annotations

import os

import torch


def load() -> None:
    if not os.environ.get("DDTREE_TEST_POISON"):
        return
    from sglang_ddtree_patch.round import worker as module

    forward, commit_block = module.DDTreeWorker.forward_batch_generation, module.commit_block

    def forward_beside_poison(worker, *arguments, **options):
        poison_free_pages(worker)
        return forward(worker, *arguments, **options)

    def leave_poison(worker, move_rows, block, predictions):
        accepted = commit_block(worker, move_rows, block, predictions)
        poison_what_was_rejected(worker, block, accepted)
        return accepted

    module.DDTreeWorker.forward_batch_generation = forward_beside_poison
    module.commit_block = leave_poison


def poison_free_pages(worker) -> None:
    target = worker.target_worker.model_runner
    allocator = target.token_to_kv_pool_allocator
    pages = allocator.get_all_free_pages()
    slots = (pages[:, None] * allocator.page_size + torch.arange(allocator.page_size)).flatten()
    for pool in (target.token_to_kv_pool, worker.draft_model_runner.token_to_kv_pool):
        poison(pool, slots)


def poison_what_was_rejected(worker, block, accepted) -> None:
    is_rejected = torch.arange(block.slots.shape[1]) >= accepted.commit_lengths[:, None]
    # Both pools index their slots alike.
    for runner in (worker.model_runner, worker.draft_model_runner):
        poison(runner.token_to_kv_pool, block.slots[is_rejected])


def poison(pool, slots: torch.Tensor) -> None:
    for buffer in (*pool.k_buffer, *pool.v_buffer):
        buffer[slots] = torch.nan
