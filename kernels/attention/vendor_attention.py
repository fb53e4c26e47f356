"""Tree verify attention with a vendor's kernel on the dense prefix: FA3 for GQA, FlashMLA for MLA.

Every tree row sees the whole prefix, so that part needs no mask and any fast kernel will do; tree and merge
are one launch of ours behind it (finish.py). Both kernels come with SGLang's own wheels and
are imported when an implementation is built. Their page tables are as wide as the slot table, which only
sizes their grids: lengths are read on the device.
"""

from __future__ import annotations

from abc import abstractmethod

import torch

from sglang_ddtree_patch.kernels.attention.finish import finish_tree_attention
from sglang_ddtree_patch.kernels.attention.prefix_pages import PrefixPages, fill_prefix_pages
from sglang_ddtree_patch.kernels.attention.verify_attention import AttentionShape, VerifyAttention

FLASH_MLA_PAGE = 64
HALF_TYPES = (torch.bfloat16, torch.float16)


def fa3_refusal(shape: AttentionShape, page_size: int, capability: tuple[int, int]) -> str | None:
    """Why FA3 cannot serve a shape on a GPU; None where it can."""
    if capability[0] not in (8, 9):
        return f"it runs on compute capability 8 and 9, and this is {capability[0]}.{capability[1]}"
    if shape.dtype not in HALF_TYPES:
        return f"it takes bfloat16 and float16, not {shape.dtype}"
    narrower_values = 128 < shape.key_dim <= 192 and 96 < shape.value_dim <= 128 and capability[0] == 9
    if shape.key_dim > 256 or shape.key_dim % 8 or (shape.key_dim != shape.value_dim and not narrower_values):
        return f"it has no kernel for heads of {shape.key_dim}/{shape.value_dim}"
    return None


def flash_mla_refusal(shape: AttentionShape, page_size: int, capability: tuple[int, int]) -> str | None:
    """Why FlashMLA cannot serve a shape on a GPU; None where it can."""
    if capability != (9, 0):
        return f"its dense kernel runs on compute capability 9.0, and this is {capability[0]}.{capability[1]}"
    if not shape.value_is_key or (shape.key_dim, shape.value_dim) != (576, 512):
        return f"it takes MLA heads of 576/512, and these are {shape}"
    if page_size != FLASH_MLA_PAGE:
        return f"it takes pages of {FLASH_MLA_PAGE}, and --page-size is {page_size}"
    if shape.dtype != torch.bfloat16:
        return f"it is used with bfloat16, not {shape.dtype}"
    if shape.capped:
        return "it cannot cap logits"
    return None


class PrefixThenTree(VerifyAttention):
    """A dense prefix kernel, then tree and merge."""

    _pages: PrefixPages  # of the forward being run: `prepare` sets it

    def __init__(self, slot_table: torch.Tensor, shape: AttentionShape, page_size: int):
        super().__init__(slot_table)
        self.shape, self.page_size = shape, page_size
        self._reserved: PrefixPages | None = None

    def reserve(self, max_batch: int, rows: int) -> None:
        # Graphs that were captured over it may stay: memory that is large enough is kept.
        if self._reserved_for(max_batch, rows) is None:
            self._reserved = PrefixPages.allocate(self.slot_table, self.page_size, max_batch, rows)

    def _reserved_for(self, batch: int, rows: int) -> PrefixPages | None:
        """The memory that was reserved, where such a batch fits."""
        reserved = self._reserved
        return reserved if reserved is not None and reserved.holds(batch, rows) else None

    def prepare(self, request_ids: torch.Tensor, prefix_lens: torch.Tensor, rows: int) -> None:
        batch = request_ids.shape[0]
        reserved = self._reserved_for(batch, rows)
        if reserved is None:
            self._pages = PrefixPages.allocate(self.slot_table, self.page_size, batch, rows)
        else:
            self._pages = reserved.first(batch)
        fill_prefix_pages(self._pages, self.slot_table, request_ids, prefix_lens, self.page_size)
        self._schedule_prefix(self._pages)

    def attend(
        self,
        query: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        tree_mask: torch.Tensor | None,
        *,
        softmax_scale: float,
        logit_cap: float = 0.0,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        pages = self._pages
        batch, rows = pages.block_slots.shape
        prefix_out, prefix_lse = self._attend_prefix(
            query.view(batch, rows, *query.shape[1:]),
            key_cache.view(-1, self.page_size, *key_cache.shape[1:]),
            value_cache.view(-1, self.page_size, *value_cache.shape[1:]),
            pages, softmax_scale, logit_cap,
        )  # fmt: skip
        prefix_out = prefix_out.view(query.shape[0], *prefix_out.shape[2:])
        return finish_tree_attention(
            prefix_out, prefix_lse, query, key_cache, value_cache, pages.block_slots, pages.lengths,
            tree_mask, softmax_scale=softmax_scale, logit_cap=logit_cap, sinks=sinks, out=prefix_out,
        )  # fmt: skip

    @abstractmethod
    def _schedule_prefix(self, pages: PrefixPages) -> None:
        """Deal the prefix's work to the GPU, once a forward."""

    @abstractmethod
    def _attend_prefix(
        self,
        query: torch.Tensor,
        key_pages: torch.Tensor,
        value_pages: torch.Tensor,
        pages: PrefixPages,
        softmax_scale: float,
        logit_cap: float,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attend to the prefix alone.

        Args:
            query: [batch, rows, heads, key_dim].
            key_pages, value_pages: [pages, page size, kv_heads, key_dim or value_dim].

        Returns:
            [batch, rows, heads, value_dim] and the natural log-sum-exp, [batch, heads, rows].
        """


class FA3(PrefixThenTree):
    """FlashAttention 3 on the prefix.

    Its own launch would find out for every layer how to deal the work (a kernel before the kernel); the
    result depends on lengths alone, so it is made once a forward.
    """

    _schedule: torch.Tensor  # of the forward being run: `_schedule_prefix` sets it

    def __init__(self, slot_table: torch.Tensor, shape: AttentionShape, page_size: int):
        from sgl_kernel.flash_attn import flash_attn_with_kvcache, get_scheduler_metadata

        super().__init__(slot_table, shape, page_size)
        self._flash_attention, self._schedule_of = flash_attn_with_kvcache, get_scheduler_metadata

    def _schedule_prefix(self, pages: PrefixPages) -> None:
        (batch, rows), shape = pages.block_slots.shape, self.shape
        self._schedule = self._schedule_of(
            batch_size=batch, max_seqlen_q=rows, max_seqlen_k=pages.page_table.shape[1] * self.page_size,
            num_heads=shape.heads, num_heads_k=shape.kv_heads, headdim=shape.key_dim,
            headdim_v=shape.value_dim, qkv_dtype=shape.dtype, cache_seqlens=pages.lengths,
            page_size=self.page_size, causal=False, has_softcap=shape.capped,
        )  # fmt: skip

    def _attend_prefix(
        self,
        query: torch.Tensor,
        key_pages: torch.Tensor,
        value_pages: torch.Tensor,
        pages: PrefixPages,
        softmax_scale: float,
        logit_cap: float,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse, *_ = self._flash_attention(
            query, key_pages, value_pages, page_table=pages.page_table, cache_seqlens=pages.lengths,
            softmax_scale=softmax_scale, softcap=logit_cap, causal=False, return_softmax_lse=True,
            scheduler_metadata=self._schedule,
        )  # fmt: skip
        return out, lse


class FlashMLA(PrefixThenTree):
    """FlashMLA's dense decoding kernel on the prefix."""

    _schedule: tuple[torch.Tensor, torch.Tensor]  # of the forward being run: `_schedule_prefix` sets it

    def __init__(self, slot_table: torch.Tensor, shape: AttentionShape, page_size: int):
        # The interface imports without its library and would fail at the first call.
        from sgl_kernel import flashmla_ops  # noqa: F401
        from sgl_kernel.flash_mla import flash_mla_with_kvcache, get_mla_metadata

        super().__init__(slot_table, shape, page_size)
        self._flash_mla, self._schedule_of = flash_mla_with_kvcache, get_mla_metadata

    def _schedule_prefix(self, pages: PrefixPages) -> None:
        rows = pages.block_slots.shape[1]
        self._schedule = self._schedule_of(pages.lengths, rows * self.shape.heads, 1)

    def _attend_prefix(
        self,
        query: torch.Tensor,
        key_pages: torch.Tensor,
        value_pages: torch.Tensor,
        pages: PrefixPages,
        softmax_scale: float,
        logit_cap: float,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return self._flash_mla(
            query, key_pages, pages.page_table, pages.lengths, self.shape.value_dim, *self._schedule,
            softmax_scale=softmax_scale, causal=False,
        )  # fmt: skip
