"""The `ddtree-verify` attention backend: tree verify over paged KV in front of a stock backend.

SGLang gives it decode and verify of the target (prefill keeps the stock backend, through SGLang's own
prefill/decode split) and, where the stock backend cannot draft, the drafter's block forward. Only target
verify is ours; whatever else is asked of the backend is answered by the wrapped one.

Under CUDA graphs the masks live in one buffer for each width that graphs are captured for: capture records
its address, and every replay is preceded by a copy of the live tree's masks into it.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
from sglang.srt.layers.attention.base_attn_backend import SharedReadEnds
from sglang.srt.layers.radix_attention import AttentionType
from sglang.srt.mem_cache.memory_pool import KVWriteLoc, MLATokenToKVPool
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
from sglang.srt.runtime_context import attention_backends, get_schedule, get_spec

from sglang_ddtree_patch.attention.layer_options import check_layers, check_pool, layer_options, refuse_extras
from sglang_ddtree_patch.attention.layers import LayerAttention
from sglang_ddtree_patch.kernels.tree.build import chain_masks
from sglang_ddtree_patch.round.verify_input import TreeVerifyInput

NO_GLUE = "ddtree-verify copies each tree's masks in before the graph is replayed"


def create_backend(runner: Any) -> DDTreeVerifyBackend:
    """Build the backend for a model runner, around the stock backend that serves its prefill."""
    stock, _ = attention_backends()
    return DDTreeVerifyBackend(runner, ATTENTION_BACKENDS[stock](runner))


class DDTreeVerifyBackend:
    """Tree verify by our kernels; every other attribute and method is the wrapped backend's.

    Not a subclass of SGLang's AttentionBackend: its class attributes would answer in place of the
    wrapped backend's.
    """

    # Lengths are read from the device; without this every round copies them to the host besides.
    needs_cpu_seq_lens = False
    # Masks travel in the verify input, not in a buffer that the draft stage fills.
    verify_mask = None

    def __init__(self, runner: Any, wrapped: Any):
        check_layers(runner.model)
        check_pool(runner.token_to_kv_pool)
        self.wrapped = wrapped
        self.kv_pool = runner.token_to_kv_pool
        self.slot_table = runner.req_to_token_pool.req_to_token
        # The choice of kernel depends on the rows, and so does what graphs read: one each a width.
        self._attention_of = functools.cache(
            lambda rows: LayerAttention(
                runner.model,
                self.kv_pool,
                self.slot_table,
                device=runner.device,
                page_size=get_schedule().page_size,
                rows=rows,
            )
        )
        # Of the forward being run; built now, so that what cannot serve is said at the start.
        self._attention = self._attention_of(get_spec().speculative_num_draft_tokens)
        self._is_target = not runner.is_draft_worker
        self._tree_masks: torch.Tensor | None = None  # of the forward being run
        self._mask_buffers: dict[int, torch.Tensor] = {}  # by width: [max batch, width, words], for graphs
        self._window_slots: torch.Tensor | None = None  # [rows], where window layers write in their own pool

    def __getattr__(self, name: str) -> Any:
        # Asked for only where this class has no answer of its own. `wrapped` itself is missing while
        # the object is being built or copied.
        if name == "wrapped":
            raise AttributeError(name)
        return getattr(self.wrapped, name)

    def shared_read_ends(self, fm: Any) -> SharedReadEnds:
        """Each layer of a verify reads the slot table, so that its reads end with the graph."""
        return SharedReadEnds.POST_REPLAY if fm.is_target_verify() else self.wrapped.shared_read_ends(fm)

    def get_fused_kv_write_buffers(self, layer: Any, forward_batch: Any) -> Any:
        """No fused writer for the block: the wrapped backend has no metadata of a verify to offer one."""
        if forward_batch.forward_mode.is_target_verify():
            return None
        return self.wrapped.get_fused_kv_write_buffers(layer, forward_batch)

    def glue_target_verify_metadata(self) -> str:
        return NO_GLUE

    def glue_draft_metadata(self) -> str:
        return NO_GLUE

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Allocate what captured graphs of target verify read by address."""
        width = max_num_tokens // max_bs
        self._mask_buffers[width] = chain_masks(max_bs, width, self.slot_table.device)
        self._attention_of(width).reserve(max_bs)

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        return 1

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Prepare an eager forward: for target verify the masks of its rows, else as the wrapped backend."""
        if not forward_batch.forward_mode.is_target_verify():
            self.wrapped.init_forward_metadata(forward_batch)
            return
        spec_info = forward_batch.spec_info
        self._tree_masks = spec_info.tree_masks if isinstance(spec_info, TreeVerifyInput) else None
        self._prepare_layers(forward_batch)

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        """Prepare a captured or replayed forward: the live masks go to the captured buffer.

        Rows of padded requests keep the masks of an earlier round, or a chain: any valid mask will do.
        """
        if not forward_batch.forward_mode.is_target_verify():
            self.wrapped.init_forward_metadata_out_graph(forward_batch, in_capture=in_capture)
            return
        buffer = self._mask_buffers[rows_of(forward_batch)]
        self._tree_masks = buffer[: forward_batch.batch_size] if self._is_target else None
        spec_info = forward_batch.spec_info
        if isinstance(spec_info, TreeVerifyInput) and spec_info.tree_masks is not None:
            buffer[: spec_info.tree_masks.shape[0]].copy_(spec_info.tree_masks)

    def init_forward_metadata_in_graph(self, forward_batch: Any) -> None:
        """Record what a verify does once before its layers: each replay does it from the live lengths."""
        if forward_batch.forward_mode.is_target_verify():
            self._prepare_layers(forward_batch)
        else:
            self.wrapped.init_forward_metadata_in_graph(forward_batch)

    def _prepare_layers(self, forward_batch: Any) -> None:
        """What is the same for all layers of a verify."""
        self._attention = self._attention_of(rows_of(forward_batch))
        self._attention.prepare(forward_batch)
        if isinstance(self.kv_pool, SWAKVPool):
            self._window_slots = self.kv_pool.translate_loc_from_full_to_swa(forward_batch.out_cache_loc)

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Attention of one layer; see ``forward_extend`` for target verify."""
        if forward_batch.forward_mode.is_target_verify():
            return self.forward_extend(q, k, v, layer, forward_batch, save_kv_cache, **kwargs)
        return self.wrapped.forward(q, k, v, layer, forward_batch, save_kv_cache, **kwargs)

    def forward_extend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        q_rope: torch.Tensor | None = None,
        k_rope: torch.Tensor | None = None,
        sinks: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Write the block's keys and values to the pool, then attend every row to prefix and block.

        Args:
            q: [rows, heads * key_dim], or the latent part [rows, heads * value_dim] beside ``q_rope``.
            k, v: the block's keys and values for the pool, or None where they are there already.
            q_rope, k_rope: rotary parts, where an MLA model passes them apart.
            sinks: [heads], a logit a head for the softmax's denominator, where a model has them.

        Returns:
            [rows, heads * value_dim] in the dtype of ``q``.
        """
        if not forward_batch.forward_mode.is_target_verify():
            if q_rope is not None:
                kwargs |= {"q_rope": q_rope, "k_rope": k_rope}
            if sinks is not None:
                kwargs["sinks"] = sinks
            return self.wrapped.forward_extend(q, k, v, layer, forward_batch, save_kv_cache, **kwargs)
        refuse_extras(layer, kwargs)
        heads, key_dim, value_dim = layer.tp_q_head_num, layer.qk_head_dim, layer.v_head_dim
        if save_kv_cache and k is not None:
            self._write_block(layer, forward_batch, k, v, k_rope)
        if q_rope is not None:
            latent = q.view(-1, heads, value_dim)
            q = torch.cat([latent, q_rope.view(latent.shape[0], heads, -1)], dim=-1)
        query = q.view(-1, heads, key_dim)
        batch = forward_batch.batch_size
        attended = self._attention[layer.layer_id].attend(
            query,
            self.kv_pool.get_key_buffer(layer.layer_id),
            self.kv_pool.get_value_buffer(layer.layer_id),
            self._masks_for(layer, batch, rows=query.shape[0] // batch),
            softmax_scale=layer.scaling,
            logit_cap=layer.logit_cap,
            **layer_options(layer, self.kv_pool, sinks),
        )
        return attended.view(-1, heads * value_dim)

    def _write_block(
        self, layer: Any, forward_batch: Any, k: torch.Tensor, v: torch.Tensor, k_rope: torch.Tensor | None
    ) -> None:
        location = KVWriteLoc.for_batch(forward_batch, swa_loc=self._window_slots)
        if k_rope is not None:
            self.kv_pool.set_mla_kv_buffer(layer, location, k, k_rope)
        elif isinstance(self.kv_pool, MLATokenToKVPool):
            self.kv_pool.set_kv_buffer(layer, location, k, v)
        else:
            self.kv_pool.set_kv_buffer(layer, location, k, v, layer.k_scale, layer.v_scale)

    def _masks_for(self, layer: Any, batch: int, rows: int) -> torch.Tensor | None:
        """The tree's masks; without a tree, all rows for the drafter's layers and a chain for others."""
        if self._tree_masks is not None or layer.attn_type == AttentionType.ENCODER_ONLY:
            return self._tree_masks
        return chain_masks(batch, rows, self.slot_table.device)


def rows_of(forward_batch: Any) -> int:
    """Rows of each request's block, padded requests included."""
    return forward_batch.input_ids.shape[0] // forward_batch.batch_size
