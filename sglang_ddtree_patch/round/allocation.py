"""Room for a round's block at the end of a request's slot row."""

from __future__ import annotations

from collections.abc import Callable

from sglang.srt.mem_cache.allocation_sizing import get_alloc_page_size, get_alloc_reserve_per_decode
from sglang.srt.runtime_context import get_spec

from sglang_ddtree_patch.settings import ALGORITHM


def row_headroom(original: Callable[[], int]) -> int:
    """Around `get_req_to_token_extra_context_len`: slots of a request's row past the context length.

    A decode round reserves twice its block, rounded up to a page. At page size 1 the stock headroom is
    one block and four slots, so near the context's end the reservation would run into the next
    request's row.
    """
    stock = original()
    if get_spec().speculative_algorithm != ALGORITHM:
        return stock
    return max(stock, get_alloc_reserve_per_decode() + get_alloc_page_size() - 1)
