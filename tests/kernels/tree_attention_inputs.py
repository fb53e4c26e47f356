"""Inputs for tree attention tests: random paged caches whose unused slots are poisoned, and trees."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from sglang_ddtree_patch.kernels.tree.build import ancestor_masks, unpack_masks


@dataclass(frozen=True)
class Case:
    prefixes: tuple[int, ...] = (70, 33)
    rows: int = 5
    heads: int = 4
    kv_heads: int = 2
    key_dim: int = 64
    value_dim: int = 64
    page_size: int = 16
    mla: bool = False
    tree: str = "random"  # or chain, star, comb, whole
    logit_cap: float = 0.0
    window: int | None = None
    sinks: bool = False
    mapped: bool = False  # the layer's pool is another than the table's
    cache_dtype: torch.dtype | None = None  # float8 or E4M3_BITS, with scales; None: that of the queries
    seed: int = 0

    def with_(self, **changes: object) -> Case:
        return replace(self, **changes)


MLA = Case(heads=4, kv_heads=1, key_dim=576, value_dim=512, mla=True)
FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
E4M3_BITS = torch.uint8  # a cache of float8 e4m3 as GPUs read it that do not know the type


def tree_parents(tree: str, rows: int, generator: torch.Generator) -> list[int]:
    """Parent row of each row, -1 for the root."""
    parents = {
        "chain": lambda row: row - 1,
        "star": lambda row: 0,
        "comb": lambda row: max(row - 2, 0) if row % 2 else row - 1,
        "random": lambda row: int(torch.randint(row, (1,), generator=generator)),
    }[tree]
    return [-1] + [parents(row) for row in range(1, rows)]


def make_inputs(case: Case, device: str, dtype: torch.dtype) -> dict:
    """The arguments of `tree_attention`, all but the page size.

    Pages are dealt in random order. Every slot that no position below ``prefix + rows`` uses, or none that a
    window still reaches, holds NaN, and the table points every position past the block at such a slot. A
    mapped case deals its pages once more: ``slot_map`` leads from the table's slot to the layer's own, and
    from pages that no window reaches to the pool's first page, which is poisoned.
    """
    generator = torch.Generator().manual_seed(case.seed)
    batch, page = len(case.prefixes), case.page_size
    pages_each = -(-(max(case.prefixes) + case.rows) // page) + 1
    page_count = batch * pages_each + 1
    # Page 0 is given to nobody.
    pages = 1 + torch.randperm(page_count - 1, generator=generator).view(batch, pages_each)
    table = (pages[:, :, None] * page + torch.arange(page)).view(batch, -1)
    slot_map = torch.arange(page_count * page)
    if case.mapped:
        own_pages = torch.cat([torch.tensor([-1]), torch.randperm(page_count - 1, generator=generator)]) + 1
        slot_map = (own_pages[:, None] * page + torch.arange(page)).flatten()

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    # Rows of the pool are wider than what a layer reads, so that strides must be honoured.
    keys = random(page_count * page, case.kv_heads, case.key_dim + 16)
    values = keys if case.mla else random(page_count * page, case.kv_heads, case.value_dim + 16)
    used = torch.zeros(page_count * page, dtype=torch.bool)
    for request, prefix in enumerate(case.prefixes):
        low = 0 if case.window is None else max(prefix - case.window, 0)
        used[slot_map[table[request, low : prefix + case.rows]]] = True
        table[request, prefix + case.rows :] = 0
        if case.mapped:
            slot_map[table[request, : low // page * page]] = 0
    keys[~used] = torch.nan
    values[~used] = torch.nan
    stored = case.cache_dtype or dtype
    if stored == torch.uint8:
        keys, values = (cache.to(torch.float8_e4m3fn).view(torch.uint8) for cache in (keys, values))
    keys = keys.to(stored).to(device)
    values = keys if case.mla else values.to(stored).to(device)

    masks = None
    if case.tree != "whole":
        parents = torch.tensor([tree_parents(case.tree, case.rows, generator) for _ in range(batch)])
        masks = ancestor_masks(parents, max_depth=case.rows).to(device)
    order = torch.randperm(batch, generator=generator)
    inputs = {
        "query": random(batch * case.rows, case.heads, case.key_dim).to(device),
        "key_cache": keys[..., : case.key_dim],
        "value_cache": values[..., : case.value_dim],
        # Requests of the batch are rows of the table in another order.
        "slot_table": table[order].int().to(device),
        "request_ids": torch.argsort(order).to(device),
        "prefix_lens": torch.tensor(case.prefixes, dtype=torch.int32, device=device),
        "tree_mask": masks,
        "softmax_scale": case.key_dim**-0.5,
        "logit_cap": case.logit_cap,
    }
    # Only what the case asks for: not every kernel takes all of it.
    if case.window is not None:
        inputs["window"] = case.window
    if case.sinks:
        inputs["sinks"] = 2 * random(case.heads).to(device)
    if case.mapped:
        inputs["slot_map"] = slot_map.to(device)
    if case.cache_dtype is not None:
        inputs |= {"k_scale": 0.5, "v_scale": 2.0}
    return inputs


def exact(inputs: dict) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tree attention, and the prefix part of it, in float64.

    Returns the whole and the prefix's output, [batch * rows, heads, value_dim], and the natural
    log-sum-exp of the prefix, [batch, heads, rows]. An empty prefix gives NaN, as a kernel may.
    """
    query, table = inputs["query"].double(), inputs["slot_table"]
    batch, (_, kv_heads, value_dim) = inputs["request_ids"].shape[0], inputs["value_cache"].shape
    rows, heads = query.shape[0] // batch, query.shape[1]
    whole = query.new_full((batch * rows, heads, value_dim), torch.nan)
    prefix_out, prefix_lse = whole.clone(), query.new_full((batch, heads, rows), torch.nan)
    visible = None if inputs["tree_mask"] is None else unpack_masks(inputs["tree_mask"])
    requests, lengths = inputs["request_ids"].tolist(), inputs["prefix_lens"].tolist()
    for index, (request, prefix) in enumerate(zip(requests, lengths, strict=True)):
        slots = table[request, : prefix + rows].long()
        keys, values = inputs["key_cache"][slots].double(), inputs["value_cache"][slots].double()
        block = slice(index * rows, (index + 1) * rows)
        grouped = query[block].view(rows, kv_heads, heads // kv_heads, -1)
        logits = torch.einsum("rkgd,mkd->kgrm", grouped, keys) * inputs["softmax_scale"]
        if inputs["logit_cap"] > 0:
            logits = inputs["logit_cap"] * torch.tanh(logits / inputs["logit_cap"])

        def average(logits: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
            return torch.einsum("kgrm,mkd->rkgd", logits.softmax(-1), values).reshape(rows, heads, -1)

        if prefix:
            prefix_lse[index] = logits[..., :prefix].logsumexp(-1).reshape(heads, rows)
            prefix_out[block] = average(logits[..., :prefix], values[:prefix])
        if visible is not None:
            logits[..., prefix:].masked_fill_(~visible[index], -torch.inf)
        whole[block] = average(logits, values)
    return whole, prefix_out, prefix_lse
