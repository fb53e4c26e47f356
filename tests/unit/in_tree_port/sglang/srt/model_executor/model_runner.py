"""Pools, attention backend and model of one worker."""

from __future__ import annotations

from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS, attn_backend_wrapper
from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator, TokenToKVPoolAllocator
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, ReqToTokenPool
from sglang.srt.model_executor.forward_batch_info import ForwardBatch
from sglang.srt.models import toy

SLOTS, CONTEXT, REQUESTS = 1024, 256, 8


class ModelRunner:
    def __init__(self, server_args, is_draft_worker: bool = False):
        self.server_args = server_args
        self.is_draft_worker = is_draft_worker
        self.device = "cpu"
        self.req_to_token_pool = ReqToTokenPool(REQUESTS, CONTEXT)
        self.token_to_kv_pool = MHATokenToKVPool(SLOTS, toy.LAYERS, toy.KV_HEADS, toy.HEAD_DIM)
        page_size = server_args.page_size
        allocator = TokenToKVPoolAllocator if page_size == 1 else PagedTokenToKVPoolAllocator
        self.token_to_kv_pool_allocator = allocator(SLOTS, page_size, self.token_to_kv_pool)
        backend = ATTENTION_BACKENDS[server_args.attention_backend](self)
        self.attn_backend = attn_backend_wrapper(self, backend)
        self.model = toy.ToyModel()

    def forward(self, batch):
        forward_batch = ForwardBatch(
            forward_mode=batch.forward_mode,
            input_ids=batch.input_ids,
            positions=batch.positions,
            req_pool_indices=batch.req_pool_indices,
            seq_lens=batch.seq_lens,
            out_cache_loc=batch.out_cache_loc,
            attn_backend=self.attn_backend,
            spec_info=batch.spec_info if batch.forward_mode.is_target_verify() else None,
        )
        self.attn_backend.init_forward_metadata(forward_batch)
        return self.model.forward(forward_batch)
