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
    from sglang_ddtree_patch.worker import DDTreeWorker

    forward, feed_drafter = DDTreeWorker.forward_batch_generation, DDTreeWorker._feed_drafter

    def forward_beside_poison(worker, *arguments, **options):
        poison_free_pages(worker)
        return forward(worker, *arguments, **options)

    def leave_poison(worker, slots, hidden_states, accepted):
        feed_drafter(worker, slots, hidden_states, accepted)
        poison_what_was_rejected(worker, slots, accepted)

    DDTreeWorker.forward_batch_generation = forward_beside_poison
    DDTreeWorker._feed_drafter = leave_poison


def poison_free_pages(worker) -> None:
    target = worker.target_worker.model_runner
    allocator = target.token_to_kv_pool_allocator
    pages = allocator.get_all_free_pages()
    slots = (pages[:, None] * allocator.page_size + torch.arange(allocator.page_size)).flatten()
    for pool in (target.token_to_kv_pool, worker.draft_model_runner.token_to_kv_pool):
        poison(pool, slots)


def poison_what_was_rejected(worker, slots, accepted) -> None:
    sizes, target = worker.sizes, worker.target_worker.model_runner
    is_rejected = torch.arange(sizes.slots) >= accepted.commit_lengths[:, None]
    block = slots.plan.write_ids(target.kv_index_translator).view(-1, sizes.slots)
    poison(target.token_to_kv_pool, block[is_rejected])
    block = worker._draft_write_ids(slots.plan).view(-1, sizes.slots)
    poison(worker.draft_model_runner.token_to_kv_pool, block[is_rejected])


def poison(pool, slots: torch.Tensor) -> None:
    for buffer in (*pool.k_buffer, *pool.v_buffer):
        buffer[slots] = torch.nan
