"""KV pool and slot look-up in plain torch, for the CPU platform.

Imported late, by the platform's methods: the memory pool module pulls in most of SGLang, and the
platform is chosen while SGLang is still importing itself.
"""

import torch
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, move_kv_cache_native


class CpuMHATokenToKVPool(MHATokenToKVPool):
    """Moves KV rows with torch indexing instead of the tiled Triton copy, which it would compile at start."""

    def _init_kv_copy_and_warmup(self) -> None:
        self._kv_copy_config = None

    def _move_kv_cache_impl(self, tgt_loc: torch.Tensor, src_loc: torch.Tensor) -> None:
        move_kv_cache_native(self.k_buffer, self.v_buffer, tgt_loc, src_loc)


def gather_cache_locs(
    *,
    req_pool_indices: torch.Tensor,  # [batch]
    req_to_token: torch.Tensor,  # [request rows, positions]
    start_offset: torch.Tensor,  # [batch], first position of each request
    end_offset: torch.Tensor,  # [batch], one past the last
    batch_size: int,
    draft_token_num: int,  # positions a request: end_offset - start_offset
    device: torch.device | str,
) -> torch.Tensor:
    """KV slots of each request's next positions, [batch * draft_token_num] int64 in request order."""
    steps = torch.arange(draft_token_num, device=device)
    positions = start_offset.long()[:, None] + steps
    return req_to_token[req_pool_indices.long()[:, None], positions].to(torch.int64).reshape(-1)
