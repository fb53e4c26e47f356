"""Inputs for tree attention tests: random paged caches whose unused slots are poisoned, and trees."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from sglang_ddtree_patch.kernels.tree import ancestor_masks, unpack_masks


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
    seed: int = 0

    def with_(self, **changes: object) -> Case:
        return replace(self, **changes)


MLA = Case(heads=4, kv_heads=1, key_dim=576, value_dim=512, mla=True)


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
    """The arguments of `tree_attention`, softmax scale and page size included.

    Pages are dealt in random order. Every slot that no position below ``prefix + rows`` uses holds NaN,
    and the table points every later position at such a slot.
    """
    generator = torch.Generator().manual_seed(case.seed)
    batch, page = len(case.prefixes), case.page_size
    pages_each = -(-(max(case.prefixes) + case.rows) // page) + 1
    pages = torch.randperm(batch * pages_each + 1, generator=generator)
    poisoned_page, pages = pages[0], pages[1:].view(batch, pages_each)
    table = (pages[:, :, None] * page + torch.arange(page)).view(batch, -1)
    slots = (batch * pages_each + 1) * page

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    # Rows of the pool are wider than what a layer reads, so that strides must be honoured.
    keys = random(slots, case.kv_heads, case.key_dim + 16)
    values = keys if case.mla else random(slots, case.kv_heads, case.value_dim + 16)
    used = torch.zeros(slots, dtype=torch.bool)
    for request, prefix in enumerate(case.prefixes):
        used[table[request, : prefix + case.rows]] = True
        table[request, prefix + case.rows :] = poisoned_page * page
    keys[~used] = torch.nan
    values[~used] = torch.nan
    keys, values = keys.to(device), values.to(device)
    keys, values = keys[..., : case.key_dim], (keys if case.mla else values)[..., : case.value_dim]

    masks = None
    if case.tree != "whole":
        parents = torch.tensor([tree_parents(case.tree, case.rows, generator) for _ in range(batch)])
        masks = ancestor_masks(parents, max_depth=case.rows).to(device)
    order = torch.randperm(batch, generator=generator)
    return {
        "query": random(batch * case.rows, case.heads, case.key_dim).to(device),
        "key_cache": keys,
        "value_cache": values,
        # Requests of the batch are rows of the table in another order.
        "slot_table": table[order].int().to(device),
        "request_ids": torch.argsort(order).to(device),
        "prefix_lens": torch.tensor(case.prefixes, dtype=torch.int32, device=device),
        "tree_mask": masks,
        "softmax_scale": case.key_dim**-0.5,
        "logit_cap": case.logit_cap,
    }


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
