"""Each GPU kernel once, small: what `launch/sanitize.sh` runs under compute-sanitizer."""

import pytest
import torch
from test_commit import random_walks, slot_rows
from tree_attention_checks import check
from tree_attention_inputs import FLOAT8, MLA, Case

from sglang_ddtree_patch.kernels.commit import RowBuffers, commit_rows

pytestmark = pytest.mark.gpu

GQA = Case(prefixes=(200, 3), rows=9, heads=8, kv_heads=2, key_dim=128, value_dim=128, page_size=64)
CASES = {
    "gqa": GQA,
    "pages of one": GQA.with_(page_size=1),
    "two row tiles, two mask words": GQA.with_(rows=70),
    "no mask": GQA.with_(tree="whole"),
    "no prefix": GQA.with_(prefixes=(0,)),
    "wide heads": GQA.with_(key_dim=192),
    "window, sinks, own pool": GQA.with_(window=50, sinks=True, mapped=True),
    "window shorter than the tree": GQA.with_(window=2, page_size=16),
    "float8": GQA.with_(cache_dtype=FLOAT8[0]),
    "mla": MLA.with_(prefixes=(200, 3), rows=9, heads=8, page_size=64),
    "mla, float8, pages of one": MLA.with_(prefixes=(70,), heads=8, page_size=1, cache_dtype=FLOAT8[0]),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_tree_attention(case):
    check(case, "cuda", torch.bfloat16)


def test_commit():
    slots = slot_rows(3, 17, page_size=16, order="scattered").contiguous().cuda()
    rows = random_walks(3, 17, 8).rows.cuda()
    buffers = [torch.randn(int(slots.max()) + 1, *shape, device="cuda") for shape in ((2, 64), (1, 576))]
    expected = [buffer[slots.gather(1, rows)] for buffer in buffers]
    commit_rows(RowBuffers.of(buffers), slots, rows)
    for buffer, wanted in zip(buffers, expected, strict=True):
        assert torch.equal(buffer[slots[:, :8]], wanted)
