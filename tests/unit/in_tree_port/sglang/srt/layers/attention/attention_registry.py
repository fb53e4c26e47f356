"""Backends by name."""

from __future__ import annotations

from sglang.srt.layers.attention.torch_backends import CausalAttnBackend, TritonAttnBackend

ATTENTION_BACKENDS = {"triton": TritonAttnBackend, "flash": CausalAttnBackend}


def attn_backend_wrapper(runner, full_attn_backend):
    """The place where special models get more than one backend; the toy model is none."""
    return full_attn_backend
