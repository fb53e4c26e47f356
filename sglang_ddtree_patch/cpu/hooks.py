"""Replacements for the few SGLang functions that assume a GPU and have no seam in the platform interface.

They are registered by the CPU platform alone, so a server on any other device never sees them, and the
decode round needs no branch for a device it is not made for.
"""

import functools

import torch
from sglang.srt.plugins.hook_registry import HookRegistry, HookType

WORD = 0xFFFFFFFF


@functools.cache
def register_cpu_hooks() -> None:
    """Register the hooks once in this process; SGLang applies them when it has loaded its plugins."""
    for target, hook, hook_type in CPU_HOOKS:
        HookRegistry.register(target, hook, hook_type)


def assign_req_to_token_pool(
    req_pool_indices: torch.Tensor,  # [batch]
    req_to_token: torch.Tensor,  # [request rows, positions], written
    start_offset: torch.Tensor,  # [batch]
    end_offset: torch.Tensor,  # [batch]
    out_cache_loc: torch.Tensor,  # slots of all requests, one after another
    batch_size: int,
) -> None:
    """Write newly allocated slots into each request's row. Stock launches a Triton kernel."""
    taken = 0
    for row, start, end in zip(
        req_pool_indices.tolist(), start_offset.tolist(), end_offset.tolist(), strict=True
    ):
        count = end - start
        req_to_token[row, start:end] = out_cache_loc[taken : taken + count].to(req_to_token.dtype)
        taken += count


def get_last_loc(
    req_to_token: torch.Tensor, req_pool_indices_tensor: torch.Tensor, prefix_lens_tensor: torch.Tensor
) -> torch.Tensor:
    """Slot of each request's last position, -1 for an empty one. Stock picks Triton by backend name."""
    from sglang.srt.mem_cache.allocation import get_last_loc_torch

    return get_last_loc_torch(req_to_token, req_pool_indices_tensor, prefix_lens_tensor)


def default_attention_backend(server_args, use_mla_backend: bool, model_config) -> str:
    """The stock backend that serves the model here. torch_native has no latent attention (MLA), no attention
    sinks, and does not find window layers in a pool of their own; Triton's interpreter does, at some tenths
    of a second a token. The platform's own method is not told the model.
    """
    needs_triton = use_mla_backend or model_config.is_hybrid_swa or model_config.has_attention_sinks
    return "triton" if needs_triton else "torch_native"


def keep_input_embeds_dtype(kwargs: dict, runner, forward_batch, pp_proxy_tensors) -> None:
    """Undo the cast of draft embeddings to bfloat16, which a float32 draft model cannot multiply."""
    if forward_batch.input_embeds is not None and forward_batch.replace_embeds is None:
        kwargs["input_embeds"] = forward_batch.input_embeds.to(runner.dtype)


def record_stream(original, tensor: torch.Tensor, stream) -> None:
    """A CPU tensor has no stream to outlive: torch raises where there is nothing to do."""
    if tensor.device.type != "cpu":
        original(tensor, stream)


def murmur_hash32(
    seed: torch.Tensor,  # [rows] any 64-bit integers
    positions: torch.Tensor,  # [rows]
    col_indices: torch.Tensor,  # [columns]
) -> torch.Tensor:
    """The noise of seeded sampling, [rows, columns] from 0 to 2**32 - 1. Stock asks its kernel package.

    MurmurHash3 (x86, 32 bits) of four words: both halves of the seed, the position, the column. int64
    throughout, as torch has no arithmetic on uint32.
    """
    seeds = seed.to(torch.int64)[:, None]
    hashed = torch.zeros_like(seeds)
    for block in (seeds & WORD, seeds >> 32 & WORD, positions.to(torch.int64)[:, None], col_indices[None]):
        mixed = _rotate_left(block * 0xCC9E2D51 & WORD, 15) * 0x1B873593 & WORD
        hashed = _rotate_left(hashed ^ mixed, 13) * 5 + 0xE6546B64 & WORD
    hashed = hashed ^ 16  # bytes hashed
    hashed = (hashed ^ hashed >> 16) * 0x85EBCA6B & WORD
    hashed = (hashed ^ hashed >> 13) * 0xC2B2AE35 & WORD
    return hashed ^ hashed >> 16


def _rotate_left(words: torch.Tensor, bits: int) -> torch.Tensor:
    return (words << bits | words >> 32 - bits) & WORD


# (what SGLang calls, what runs instead, how)
CPU_HOOKS = (
    (
        "sglang.srt.mem_cache.allocation.assign_req_to_token_pool_func",
        assign_req_to_token_pool,
        HookType.REPLACE,
    ),
    ("sglang.srt.mem_cache.allocation.get_last_loc", get_last_loc, HookType.REPLACE),
    (
        "sglang.srt.arg_groups.model_override_base.get_default_attn_backend",
        default_attention_backend,
        HookType.REPLACE,
    ),
    (
        "sglang.srt.model_executor.model_runner.ModelRunner._extend_forward_kwargs",
        keep_input_embeds_dtype,
        HookType.AFTER,
    ),
    ("sglang.srt.layers.sampler.murmur_hash32", murmur_hash32, HookType.REPLACE),
    ("torch.Tensor.record_stream", record_stream, HookType.AROUND),
)
