"""Which implementation of tree attention each layer of a model runs, chosen when its backend is built."""

from __future__ import annotations

import logging
from typing import Any

import torch
from sglang.srt.layers.radix_attention import RadixAttention

from sglang_ddtree_patch.attention.kernel_choice import build_attention, choose_kernel
from sglang_ddtree_patch.attention.layer_options import has_window
from sglang_ddtree_patch.errors import ConfigurationError
from sglang_ddtree_patch.kernels.attention.verify_attention import AttentionShape, VerifyAttention

logger = logging.getLogger(__name__)


class LayerAttention:
    """The implementations of a model's layers: one for each kind of layer, which is one for most models."""

    def __init__(
        self,
        model: torch.nn.Module,
        kv_pool: Any,
        slot_table: torch.Tensor,
        *,
        device: str,
        page_size: int,
        rows: int,
    ):
        """
        Args:
            kv_pool: SGLang's pool of the model's keys and values.
            slot_table: [requests, positions] int32, the slot of each logical position.
            device: SGLang's name of the device.
            rows: rows of each request's block, which is what the choice of kernel is made for.

        Raises:
            ConfigurationError: the kernel asked for cannot serve a layer.
        """
        built: dict[AttentionShape, VerifyAttention] = {}
        self._of_layer: dict[int, VerifyAttention] = {}
        for layer in model.modules():
            if not isinstance(layer, RadixAttention):
                continue
            shape = shape_in_pool(layer, kv_pool)
            if shape is None:
                continue
            if shape not in built:
                kernel = choose_kernel(device, shape, page_size, rows, slot_table.shape[1])
                built[shape] = build_attention(kernel, slot_table, shape, page_size)
                logger.info(
                    "DDTREE: %s, blocks of %d rows, pages of %d: the %s kernel.",
                    shape, rows, page_size, kernel,
                )  # fmt: skip
            self._of_layer[layer.layer_id] = built[shape]
        if not built:
            raise ConfigurationError(
                f"{type(model).__name__} keeps its keys and values in a layout that ddtree-verify does not "
                "read. Use --speculative-algorithm DFLASH for this model."
            )
        self._implementations, self._rows = list(built.values()), rows

    def __getitem__(self, layer_id: int) -> VerifyAttention:
        return self._of_layer[layer_id]

    def reserve(self, max_batch: int) -> None:
        """Allocate what captured graphs read by address."""
        for attention in self._implementations:
            attention.reserve(max_batch, self._rows)

    def prepare(self, forward_batch: Any) -> None:
        """Get ready for the layers of one target verify; recorded into a graph, it replays with it."""
        for attention in self._implementations:
            attention.prepare(forward_batch.req_pool_indices, forward_batch.seq_lens, self._rows)


def shape_in_pool(layer: Any, kv_pool: Any) -> AttentionShape | None:
    """The heads of a layer that attends to what the pool holds; None for one that does not.

    An MLA model has a second attention for each layer, over keys and values expanded from the latents:
    prefill uses it, verify never does.
    """
    keys, values = kv_pool.get_key_buffer(layer.layer_id), kv_pool.get_value_buffer(layer.layer_id)
    if keys.dim() != 3 or keys.shape[1:] != (layer.tp_k_head_num, layer.qk_head_dim):
        return None
    return AttentionShape(
        heads=layer.tp_q_head_num,
        kv_heads=layer.tp_k_head_num,
        key_dim=layer.qk_head_dim,
        value_dim=layer.v_head_dim,
        value_is_key=keys.data_ptr() == values.data_ptr(),
        dtype=keys.dtype,
        capped=layer.logit_cap > 0,
        windowed=has_window(layer),
    )
