"""Commit for an SGLang that carries a DDTREE port of its own, once `ddtree patch` has opened its locks.

Such a port keeps accepted rows by exchanging slots of the page table, which takes pages of one slot. It
goes on doing so: the patch puts `committing` around its step from logits to committed tokens, and what the
port leaves in the page table says which rows it accepted. Nothing else of the port need be known.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch

from sglang_ddtree_patch.errors import ConfigurationError
from sglang_ddtree_patch.settings import ALGORITHM

KNOWN_POOLS = ("MHATokenToKVPool", "MLATokenToKVPool")  # subclasses add scales or lay pages out otherwise


def committing(verify_input: Any, batch: Any, page_size: int) -> Callable[..., Any]:
    """The port's `verify`, for any page size. Call what this returns with page_size=1.

    The port accepts and keeps its accounts as for pages of one slot. Then the accepted rows' KV moves to
    the front of the block, the page table names the block's slots again, and whole pages behind the
    committed length are freed.
    """
    if page_size == 1 or batch.forward_mode.is_idle():
        return verify_input.verify
    return functools.partial(_commit, verify_input.verify, batch, page_size)


def _commit(verify: Callable[..., Any], batch: Any, page_size: int, /, *args: Any, **kwargs: Any) -> Any:
    allocator, table = batch.token_to_kv_pool_allocator, batch.req_to_token_pool.req_to_token
    requests = batch.req_pool_indices[:, None]
    prefix_lens = batch.seq_lens.to(torch.int64, copy=True)  # the port may add to it in place
    block = batch.out_cache_loc.view(len(prefix_lens), -1).clone()  # [batch, width]
    offsets = torch.arange(block.shape[1], device=block.device)
    _refuse_slots_out_of_page_order(block, prefix_lens[:, None] + offsets, page_size)
    with _block_kept(allocator, block):
        result = verify(*args, **kwargs)

    commit_lens = batch.seq_lens.to(torch.int64) - prefix_lens
    is_committed = offsets < commit_lens[:, None]
    positions = (prefix_lens[:, None] + offsets).clamp(max=table.shape[1] - 1)
    accepted = table[requests, positions]
    is_row = accepted[:, :, None] == block[:, None, :]  # [batch, offset, row]
    rows = torch.where(is_committed, is_row.to(torch.int8).argmax(-1), offsets)
    is_known = torch.where(is_committed, is_row.any(-1) & (rows >= offsets), True)
    if not (is_known.all() and (commit_lens > 0).all()):
        raise ConfigurationError(
            "this DDTREE port does not leave the accepted slots in the page table and the new lengths in "
            "batch.seq_lens, so its commit cannot be taken over: ddtree patch revert"
        )
    move_rows(allocator.get_kvcache(), block, rows)
    batch.out_cache_loc = block[is_committed]
    where = requests.expand_as(block)[is_committed], positions[is_committed]
    table[where] = batch.out_cache_loc.to(table.dtype)
    whole_pages = -(-(prefix_lens + commit_lens) // page_size) * page_size
    allocator.free(block[prefix_lens[:, None] + offsets >= whole_pages[:, None]])
    return result


def move_rows(pool: Any, slots: torch.Tensor, rows: torch.Tensor) -> None:
    """Move accepted rows to the front of their blocks, in every layer.

    Args:
        pool: SGLang's KV pool.
        slots: [batch, width] int64, the block's slots.
        rows: [batch, width] int64, the row that belongs at each offset; itself where nothing moves.
    """
    buffers = _row_buffers(pool)
    if buffers[0].is_cuda and torch.version.hip is None:
        from sglang_ddtree_patch.kernels.commit import RowBuffers, commit_rows

        commit_rows(RowBuffers.of(buffers), slots.contiguous(), rows.contiguous())
        return
    targets, sources = slots.flatten(), slots.gather(1, rows).flatten()
    for buffer in buffers:
        buffer[targets] = buffer[sources]  # read as a whole before it is written


def _row_buffers(pool: Any) -> list[torch.Tensor]:
    """The pool's buffers, [slots, ...] each."""
    name = type(pool).__name__
    if name not in KNOWN_POOLS:
        raise ConfigurationError(f"{ALGORITHM} cannot move rows in a {name} yet: serve with --page-size 1.")
    return list(pool.kv_buffer) if name == "MLATokenToKVPool" else [*pool.k_buffer, *pool.v_buffer]


@contextlib.contextmanager
def _block_kept(allocator: Any, block: torch.Tensor) -> Iterator[None]:
    """Let nobody free slots of the block meanwhile: the pages are shared by kept and rejected rows."""
    free = allocator.free

    def free_others(slots: torch.Tensor) -> None:
        free(slots[~torch.isin(slots, block)])

    allocator.free = free_others  # on the object: whatever name the port knows it by
    try:
        yield
    finally:
        del allocator.free


def _refuse_slots_out_of_page_order(block: torch.Tensor, positions: torch.Tensor, page_size: int) -> None:
    """A port may take a block's slots as if pages had one slot; the prefix after it would not be readable."""
    if not torch.equal(block % page_size, positions % page_size):
        raise ConfigurationError(
            "this DDTREE port does not allocate the verify block in whole pages, so it serves --page-size 1 "
            "alone. SGLang's own prepare_for_verify of DFLASH does: give it self.page_size there."
        )
