"""How tree attention tests run the kernels: poisoned outputs, every device and dtype there is, one bound."""

from __future__ import annotations

import pytest
import torch
from tree_attention_inputs import E4M3_BITS, Case, make_inputs

from sglang_ddtree_patch.kernels.attention.configs import HeadShape, TreeAttentionConfig
from sglang_ddtree_patch.kernels.attention.reference import tree_attention_reference
from sglang_ddtree_patch.kernels.attention.tree_attention import plan_tree_attention, tree_attention

HAS_GPU = torch.cuda.is_available()
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}
MANY_SPLITS = TreeAttentionConfig(block_m=16, block_n=16, warps=4, stages=2, programs_per_sm=24)

on_cpu = pytest.param("cpu", torch.float32, marks=pytest.mark.skipif(HAS_GPU, reason="the GPU runs it"))
on_gpu = [pytest.param("cuda", dtype, marks=pytest.mark.gpu) for dtype in TOLERANCE]
everywhere = pytest.mark.parametrize(("device", "dtype"), [on_cpu, *on_gpu])


def attend(inputs: dict, page_size: int, config: TreeAttentionConfig | None = None) -> torch.Tensor:
    """Run the kernels into a poisoned output through a poisoned workspace."""
    query, kv_heads, value_dim = inputs["query"], inputs["key_cache"].shape[1], inputs["value_cache"].shape[2]
    batch, heads = inputs["request_ids"].shape[0], query.shape[1]
    shared = inputs["key_cache"].data_ptr() == inputs["value_cache"].data_ptr()
    head = HeadShape(query.shape[2], value_dim, value_is_key=shared, element_size=query.element_size())
    rows = query.shape[0] // batch
    plan = plan_tree_attention(
        query.device, head, batch=batch, rows=rows, heads=heads, kv_heads=kv_heads, config=config
    )
    elements = plan.workspace_elements(rows, heads, value_dim)
    workspace = torch.full((elements,), torch.nan, device=query.device)
    out = torch.full((query.shape[0], heads, value_dim), torch.nan, dtype=query.dtype, device=query.device)
    return tree_attention(**inputs, page_size=page_size, out=out, workspace=workspace, config=config)


def check(case: Case, device: str, dtype: torch.dtype, config: TreeAttentionConfig | None = None) -> None:
    """The kernels' result for a case, against the reference in float32."""
    inputs = make_inputs(case, device, dtype)
    result = attend(inputs, case.page_size, config).double()
    inputs["query"] = inputs["query"].float()
    if case.cache_dtype == E4M3_BITS:
        for name in ("key_cache", "value_cache"):
            inputs[name] = inputs[name].view(torch.float8_e4m3fn)
    expected = tree_attention_reference(**inputs).double()
    error = ((result - expected).norm() / expected.norm()).item()
    assert error <= TOLERANCE[dtype], f"{case}: relative error {error:.2e}"
