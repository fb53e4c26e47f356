"""What sglang_ddtree_patch/in_tree uses of the SGLang around a DDTREE port, looked for before patching it.

The names are those of SGLang's first speculative schema (`dflash_worker.py`), which ports build on.
"""

from __future__ import annotations

from sglang_ddtree_patch.contract import Attribute, Use

_CAPTURE = "bs num_tokens req_pool_indices seq_lens encoder_lens forward_mode spec_info"
_REPLAY = "bs req_pool_indices seq_lens seq_lens_sum encoder_lens forward_mode spec_info seq_lens_cpu"
_FORWARD = "q k v layer forward_batch save_kv_cache **kwargs"


def _entries(use: Use, module: str, owner: str, **names: str | None) -> list[Attribute]:
    return [
        Attribute(
            use, f"sglang.srt.{module}", f"{owner}.{name}",
            None if parameters is None else tuple(parameters.split()), (),
        )
        for name, parameters in names.items()
    ]  # fmt: skip


def _read(module: str, owner: str, names: str) -> list[Attribute]:
    return _entries(Use.READ, module, owner, **dict.fromkeys(names.split()))


IN_TREE_CONTRACT: tuple[Attribute, ...] = (
    *_entries(
        Use.OVERRIDE, "layers.attention.base_attn_backend", "AttentionBackend",
        init_forward_metadata="forward_batch",
        init_cuda_graph_state="max_bs max_num_tokens",
        init_forward_metadata_capture_cuda_graph=_CAPTURE,
        init_forward_metadata_replay_cuda_graph=_REPLAY,
        forward=_FORWARD,
    ),
    *_read("model_executor.forward_batch_info", "ForwardBatch", "forward_mode req_pool_indices seq_lens"),
    *_read("model_executor.forward_batch_info", "ForwardBatch", "out_cache_loc spec_info"),
    *_entries(Use.CALL, "model_executor.forward_batch_info", "ForwardMode", is_target_verify="", is_idle=""),
    *_read("model_executor.model_runner", "ModelRunner", "server_args is_draft_worker device"),
    # Its token_to_kv_pool is set by a mixin of this or that name.
    *_read("model_executor.model_runner", "ModelRunner", "req_to_token_pool"),
    *_read("layers.radix_attention", "RadixAttention", "layer_id scaling logit_cap tp_q_head_num"),
    *_read("layers.radix_attention", "RadixAttention", "qk_head_dim v_head_dim sliding_window_size"),
    *_read("managers.schedule_batch", "ScheduleBatch", "forward_mode seq_lens out_cache_loc"),
    *_read("managers.schedule_batch", "ScheduleBatch", "req_pool_indices req_to_token_pool"),
    *_read("managers.schedule_batch", "ScheduleBatch", "token_to_kv_pool_allocator"),
    *_read("mem_cache.memory_pool", "ReqToTokenPool", "req_to_token"),
    *_read("mem_cache.memory_pool", "MHATokenToKVPool", "k_buffer v_buffer"),
    *_read("mem_cache.memory_pool", "MLATokenToKVPool", "kv_buffer"),
    *_entries(
        Use.CALL, "mem_cache.memory_pool", "MHATokenToKVPool",
        get_key_buffer="layer_id", get_value_buffer="layer_id",
        set_kv_buffer="layer loc cache_k cache_v k_scale v_scale layer_id_override",
    ),
    *_entries(
        Use.CALL, "mem_cache.memory_pool", "MLATokenToKVPool",
        get_key_buffer="layer_id", get_value_buffer="layer_id", set_kv_buffer="layer loc cache_k cache_v",
        set_mla_kv_buffer="layer loc cache_k_nope cache_k_rope",
    ),
    *_entries(
        Use.CALL, "mem_cache.allocator", "BaseTokenToKVPoolAllocator", get_kvcache="", free="free_index"
    ),
)  # fmt: skip
