"""Every layer of a model gets an implementation of tree attention that fits it."""

from types import SimpleNamespace

import pytest
import torch
from sglang.srt.layers.radix_attention import RadixAttention

from sglang_ddtree_patch.attention.layers import LayerAttention, shape_in_pool
from sglang_ddtree_patch.errors import ConfigurationError
from sglang_ddtree_patch.kernels.attention.reference import tree_attention_reference


class Pool:
    """Keys and values of each layer, as SGLang's pools hand them out."""

    def __init__(self, keys: list[torch.Tensor], values: list[torch.Tensor]):
        self.keys, self.values = keys, values

    def get_key_buffer(self, layer_id: int) -> torch.Tensor:
        return self.keys[layer_id]

    def get_value_buffer(self, layer_id: int) -> torch.Tensor:
        return self.values[layer_id]


def layer_attention(model: torch.nn.Module, pool: Pool, slot_table: torch.Tensor) -> LayerAttention:
    return LayerAttention(model, pool, slot_table, device="cpu", page_size=4, rows=3)


def test_layers_of_two_kinds_each_get_their_own_attention():
    """Heads may differ from layer to layer; layers of one kind share what a forward prepares."""
    layers = [
        RadixAttention(4, 16, 0.25, 2, layer_id=0),
        RadixAttention(4, 16, 0.25, 2, layer_id=1),
        RadixAttention(2, 32, 0.5, 1, layer_id=2, logit_cap=5.0),
    ]
    shapes = [(2, 16), (2, 16), (1, 32)]
    pool = Pool(*([torch.randn(64, *shape) for shape in shapes] for _ in range(2)))
    slot_table = torch.arange(64, dtype=torch.int32).view(2, 32)
    attention = layer_attention(torch.nn.Sequential(*layers), pool, slot_table)
    assert attention[0] is attention[1]
    assert attention[0] is not attention[2]

    batch = SimpleNamespace(
        input_ids=torch.zeros(6), batch_size=2, req_pool_indices=torch.tensor([1, 0]),
        seq_lens=torch.tensor([9, 20]),
    )  # fmt: skip
    attention.prepare(batch)
    for layer in layers:
        query = torch.randn(6, layer.tp_q_head_num, layer.qk_head_dim)
        cache = pool.keys[layer.layer_id], pool.values[layer.layer_id]
        options = {"softmax_scale": layer.scaling, "logit_cap": layer.logit_cap}
        result = attention[layer.layer_id].attend(query, *cache, None, **options)
        assert torch.equal(
            result,
            tree_attention_reference(
                query, *cache, slot_table, batch.req_pool_indices, batch.seq_lens, None, **options
            ),
        )


def test_mla_layers_are_known_by_what_the_pool_holds():
    """The prefill twin of a layer, over expanded keys, has the same number and is not asked to verify."""
    latent = RadixAttention(8, 576, 0.1, 1, layer_id=0, v_head_dim=512)
    expanded = RadixAttention(8, 192, 0.1, 8, layer_id=0, v_head_dim=128)
    keys = torch.randn(8, 1, 576)
    pool = Pool([keys], [keys[..., :512]])
    assert shape_in_pool(expanded, pool) is None
    shape = shape_in_pool(latent, pool)
    assert shape.value_is_key
    assert (shape.heads, shape.kv_heads, shape.key_dim, shape.value_dim) == (8, 1, 576, 512)
    layer_attention(torch.nn.Sequential(expanded, latent), pool, torch.zeros(1, 8, dtype=torch.int32))


def test_a_pool_in_another_layout_is_refused():
    model = torch.nn.Sequential(RadixAttention(4, 16, 0.25, 2, layer_id=0))
    by_head = torch.zeros(16, 2, 4, 16)  # pages, heads, positions of a page, width
    with pytest.raises(ConfigurationError, match=r"layout that ddtree-verify does not read.*DFLASH"):
        layer_attention(model, Pool([by_head], [by_head]), torch.zeros(1, 8, dtype=torch.int32))
