"""The `ddtree-verify` attention backend: tree verify over paged KV in front of a stock backend.

SGLang gives it decode and verify of the target (prefill keeps the stock backend, through SGLang's own
prefill/decode split) and, where the stock backend cannot draft, the drafter's block forward. Only target
verify is ours; whatever else is asked of the backend is answered by the wrapped one.
"""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
from sglang.srt.layers.radix_attention import AttentionType
from sglang.srt.mem_cache.memory_pool import KVWriteLoc
from sglang.srt.runtime_context import attention_backends

from sglang_ddtree_patch.kernels.reference import tree_attention_reference
from sglang_ddtree_patch.kernels.tree import ancestor_masks
from sglang_ddtree_patch.verify_input import TreeVerifyInput


def create_backend(runner: Any) -> DDTreeVerifyBackend:
    """Build the backend for a model runner, around the stock backend that serves its prefill."""
    stock, _ = attention_backends()
    return DDTreeVerifyBackend(runner, ATTENTION_BACKENDS[stock](runner))


class DDTreeVerifyBackend:
    """Tree verify by the PyTorch reference; every other attribute and method is the wrapped backend's.

    Not a subclass of SGLang's AttentionBackend: its class attributes would answer in place of the
    wrapped backend's.
    """

    # Lengths are read from the device; without this every round copies them to the host besides.
    needs_cpu_seq_lens = False
    # Masks travel in the verify input, not in a buffer that the draft stage fills.
    verify_mask = None

    def __init__(self, runner: Any, wrapped: Any):
        self.wrapped = wrapped
        self.kv_pool = runner.token_to_kv_pool
        self.slot_table = runner.req_to_token_pool.req_to_token
        self._tree_masks: torch.Tensor | None = None

    def __getattr__(self, name: str) -> Any:
        # Asked for only where this class has no answer of its own. `wrapped` itself is missing while
        # the object is being built or copied.
        if name == "wrapped":
            raise AttributeError(name)
        return getattr(self.wrapped, name)

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Prepare a forward: for target verify the masks of its rows, else as the wrapped backend does."""
        if not forward_batch.forward_mode.is_target_verify():
            self.wrapped.init_forward_metadata(forward_batch)
            return
        spec_info = forward_batch.spec_info
        self._tree_masks = spec_info.tree_masks if isinstance(spec_info, TreeVerifyInput) else None

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
        **kwargs: Any,
    ) -> torch.Tensor:
        """Write the block's keys and values to the pool, then attend every row to prefix and block.

        Args:
            q: [rows, heads * key_dim], or the latent part [rows, heads * value_dim] beside ``q_rope``.
            k, v: the block's keys and values for the pool, or None where they are there already.
            q_rope, k_rope: rotary parts, where an MLA model passes them apart.

        Returns:
            [rows, heads * value_dim] in the dtype of ``q``.
        """
        if not forward_batch.forward_mode.is_target_verify():
            if q_rope is not None:
                kwargs |= {"q_rope": q_rope, "k_rope": k_rope}
            return self.wrapped.forward_extend(q, k, v, layer, forward_batch, save_kv_cache, **kwargs)
        if kwargs.get("sinks") is not None:
            raise NotImplementedError("ddtree-verify has no attention sinks yet; serve with DFLASH.")
        heads, key_dim, value_dim = layer.tp_q_head_num, layer.qk_head_dim, layer.v_head_dim
        if save_kv_cache and k is not None:
            self._write_block(layer, forward_batch, k, v, k_rope)
        if q_rope is not None:
            latent = q.view(-1, heads, value_dim)
            q = torch.cat([latent, q_rope.view(latent.shape[0], heads, -1)], dim=-1)
        query = q.view(-1, heads, key_dim)
        attended = tree_attention_reference(
            query,
            self.kv_pool.get_key_buffer(layer.layer_id),
            self.kv_pool.get_value_buffer(layer.layer_id),
            self.slot_table,
            forward_batch.req_pool_indices,
            forward_batch.seq_lens,
            self._masks_for(layer, forward_batch.batch_size, rows=query.shape[0] // forward_batch.batch_size),
            softmax_scale=layer.scaling,
            logit_cap=layer.logit_cap,
        )
        return attended.view(-1, heads * value_dim)

    def _write_block(
        self, layer: Any, forward_batch: Any, k: torch.Tensor, v: torch.Tensor, k_rope: torch.Tensor | None
    ) -> None:
        location = KVWriteLoc.for_batch(forward_batch)
        if k_rope is not None:
            self.kv_pool.set_mla_kv_buffer(layer, location, k, k_rope)
        else:
            self.kv_pool.set_kv_buffer(layer, location, k, v)

    def _masks_for(self, layer: Any, batch: int, rows: int) -> torch.Tensor | None:
        """The tree's masks; without a tree, all rows for the drafter's layers and a chain for others."""
        if self._tree_masks is not None or layer.attn_type == AttentionType.ENCODER_ONLY:
            return self._tree_masks
        chain = torch.arange(-1, rows - 1, device=self.slot_table.device)
        return ancestor_masks(chain.expand(batch, rows), max_depth=rows - 1)
