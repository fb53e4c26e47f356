"""Tree verify for an SGLang that carries a DDTREE port of its own, once `ddtree patch` has opened its locks.

Such a port verifies with the Triton backend and a mask over all keys. The patch calls `in_front_of` where
SGLang builds an attention backend, and the same mask then reaches our kernels, whatever backend serves the
rest; commit.py is the other half.

Ports live in older engines than contract.py knows, so nothing here imports SGLang. What is used of them is
in patches/in_tree_contract.py and is looked for before a tree is patched.
"""

from __future__ import annotations

from typing import Any

import torch

from sglang_ddtree_patch.attention.kernel_choice import own_function, own_kernel
from sglang_ddtree_patch.errors import ConfigurationError
from sglang_ddtree_patch.kernels.tree.build import WORD_BITS, chain_masks, mask_words
from sglang_ddtree_patch.settings import ALGORITHM


def in_front_of(runner: Any, backend: Any) -> Any:
    """The attention backend of a model runner, with tree verify of the target taken over."""
    algorithm = str(runner.server_args.speculative_algorithm).upper()
    if runner.is_draft_worker or algorithm != ALGORITHM:
        return backend
    return InTreeVerifyBackend(runner, backend)


def block_masks(custom_mask: torch.Tensor, prefix_lens: torch.Tensor, width: int) -> torch.Tensor:
    """The tree's part of SGLang's verify mask, as bitmasks; nothing is read on the host.

    Args:
        custom_mask: flat bool: for one request after another, [width, prefix + width], true where a row sees
            a key. Every row sees the whole prefix.
        prefix_lens: [batch] integers.
        width: rows of the block.

    Returns:
        [batch, width, words] int64.
    """
    prefixes = prefix_lens.to(torch.int64)
    row_lens = prefixes + width
    starts = width * (row_lens.cumsum(0) - row_lens) + prefixes
    steps = torch.arange(width, device=custom_mask.device)
    index = starts[:, None, None] + steps[:, None] * row_lens[:, None, None] + steps
    return pack_masks(custom_mask[index])


def pack_masks(visible: torch.Tensor) -> torch.Tensor:
    """[..., width, width] bool as bitmasks: [..., width, words] int64."""
    width = visible.shape[-1]
    padding = mask_words(width) * WORD_BITS - width
    bits = torch.nn.functional.pad(visible.to(torch.int64), (0, padding)).unflatten(-1, (-1, WORD_BITS))
    return (bits << torch.arange(WORD_BITS, device=visible.device)).sum(-1)


class InTreeVerifyBackend:
    """Verify under a tree's mask by our kernels; everything else is the wrapped backend's.

    The port hands its mask over as it does to Triton: `custom_mask` of the forward's spec_info.
    """

    def __init__(self, runner: Any, wrapped: Any):
        self.wrapped = wrapped
        self._pool = runner.token_to_kv_pool
        self._slot_table = runner.req_to_token_pool.req_to_token
        self._attend = own_function(own_kernel(runner.device), runner.server_args.page_size)
        self._masks: torch.Tensor | None = None  # of the forward being run; None: the wrapped backend's
        self._mask_buffers: dict[int, torch.Tensor] = {}  # by width: [max batch, width, words], for graphs

    def __getattr__(self, name: str) -> Any:
        if name == "wrapped":  # while the object is being built or copied
            raise AttributeError(name)
        return getattr(self.wrapped, name)

    def init_forward_metadata(self, forward_batch: Any) -> None:
        self._masks = None
        spec_info = forward_batch.spec_info
        if forward_batch.forward_mode.is_target_verify() and spec_info.custom_mask is not None:
            self._masks = block_masks(
                spec_info.custom_mask, forward_batch.seq_lens, spec_info.draft_token_num
            )
        else:
            self.wrapped.init_forward_metadata(forward_batch)

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Allocate what captured graphs read by address."""
        self.wrapped.init_cuda_graph_state(max_bs, max_num_tokens)
        width = max_num_tokens // max_bs
        self._mask_buffers[width] = chain_masks(max_bs, width, self._slot_table.device)

    def init_forward_metadata_capture_cuda_graph(
        self,
        bs: int,
        num_tokens: int,
        req_pool_indices: torch.Tensor,
        seq_lens: torch.Tensor,
        encoder_lens: torch.Tensor | None,
        forward_mode: Any,
        spec_info: Any,
    ) -> None:
        """Record the address of the masks; what they hold is a chain until a replay."""
        if forward_mode.is_target_verify():
            self._masks = self._mask_buffers[num_tokens // bs][:bs]
            return
        self._masks = None
        self.wrapped.init_forward_metadata_capture_cuda_graph(
            bs, num_tokens, req_pool_indices, seq_lens, encoder_lens, forward_mode, spec_info
        )

    def init_forward_metadata_replay_cuda_graph(
        self,
        bs: int,
        req_pool_indices: torch.Tensor,
        seq_lens: torch.Tensor,
        seq_lens_sum: int,
        encoder_lens: torch.Tensor | None,
        forward_mode: Any,
        spec_info: Any,
        seq_lens_cpu: torch.Tensor | None,
    ) -> None:
        """Copy the live tree's masks in. Requests that pad the batch keep those of an earlier round."""
        if not forward_mode.is_target_verify():
            self.wrapped.init_forward_metadata_replay_cuda_graph(
                bs,
                req_pool_indices,
                seq_lens,
                seq_lens_sum,
                encoder_lens,
                forward_mode,
                spec_info,
                seq_lens_cpu,
            )
            return
        width = spec_info.draft_token_num
        requests = spec_info.draft_token.shape[0] // width
        if spec_info.custom_mask is None:
            masks = chain_masks(requests, width, seq_lens.device)
        else:
            masks = block_masks(spec_info.custom_mask, seq_lens[:requests], width)
        self._mask_buffers[width][:requests].copy_(masks)

    def forward(
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
        """Attention of one layer: [rows, heads * value_dim].

        Args:
            q: [rows, heads * key_dim], or the latent part beside ``q_rope`` where an MLA model passes
                rotary parts apart.
            k, v: the block's keys and values, or None where the pool has them already.
        """
        if self._masks is None or not forward_batch.forward_mode.is_target_verify():
            if q_rope is not None:
                kwargs |= {"q_rope": q_rope, "k_rope": k_rope}
            return self.wrapped.forward(q, k, v, layer, forward_batch, save_kv_cache, **kwargs)
        _refuse_what_a_tree_cannot_attend_to(layer, kwargs)
        heads = layer.tp_q_head_num
        if save_kv_cache and k is not None:
            location = forward_batch.out_cache_loc
            if k_rope is not None:
                self._pool.set_mla_kv_buffer(layer, location, k, k_rope)
            else:
                self._pool.set_kv_buffer(layer, location, k, v)
        if q_rope is not None:
            latent = q.view(-1, heads, layer.v_head_dim)
            q = torch.cat([latent, q_rope.view(latent.shape[0], heads, -1)], dim=-1)
        attended = self._attend(
            q.view(-1, heads, layer.qk_head_dim),
            self._pool.get_key_buffer(layer.layer_id),
            self._pool.get_value_buffer(layer.layer_id),
            self._slot_table,
            forward_batch.req_pool_indices,
            forward_batch.seq_lens,
            self._masks,
            softmax_scale=layer.scaling,
            logit_cap=layer.logit_cap,
        )
        return attended.view(-1, heads * layer.v_head_dim)


def _refuse_what_a_tree_cannot_attend_to(layer: Any, extras: dict[str, Any]) -> None:
    asked = sorted(name for name, value in extras.items() if value is not None)
    if layer.sliding_window_size > 0:
        asked.append("a sliding window")
    if asked:
        raise ConfigurationError(
            f"layer {layer.layer_id} attends with {', '.join(asked)}, which {ALGORITHM} cannot verify yet. "
            "Serve this model with --speculative-algorithm DFLASH."
        )
