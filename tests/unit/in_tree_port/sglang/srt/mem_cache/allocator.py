"""Who owns which slot."""

from __future__ import annotations

import torch


class BaseTokenToKVPoolAllocator:
    def __init__(self, size: int, page_size: int, kvcache):
        self.page_size = page_size
        self._kvcache = kvcache
        # Shuffled, so that neighbours in a sequence are no neighbours in the pool.
        pages = size // page_size
        self.free_pages = 1 + torch.randperm(pages - 1, generator=torch.Generator().manual_seed(7))
        self.initial_pages = len(self.free_pages)

    def get_kvcache(self):
        return self._kvcache

    def available_size(self):
        return len(self.free_pages) * self.page_size

    def _take(self, count: int):
        if count > len(self.free_pages):
            raise RuntimeError("out of KV cache")
        taken, self.free_pages = self.free_pages[:count], self.free_pages[count:]
        return taken

    def free(self, free_index: torch.Tensor):
        pages = torch.unique(free_index // self.page_size)
        if torch.isin(pages, self.free_pages).any():
            raise RuntimeError("freed twice")
        self.free_pages = torch.cat([self.free_pages, pages.to(self.free_pages.dtype)])


class TokenToKVPoolAllocator(BaseTokenToKVPoolAllocator):
    """Pages of one slot."""

    def alloc(self, need_size: int):
        return self._take(need_size)


class PagedTokenToKVPoolAllocator(BaseTokenToKVPoolAllocator):
    """A sequence fills its last page before it gets another."""

    def alloc_extend(self, prefix_lens: torch.Tensor, seq_lens: torch.Tensor, last_loc: torch.Tensor):
        slots = []
        for prefix, end, slot in zip(prefix_lens.tolist(), seq_lens.tolist(), last_loc.tolist(), strict=True):
            for position in range(prefix, end):
                at_page_start = position % self.page_size == 0
                slot = int(self._take(1)) * self.page_size if at_page_start else slot + 1
                slots.append(slot)
        return torch.tensor(slots)
