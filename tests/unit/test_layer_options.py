"""What a layer asks of attention is served or refused, whatever config or flag it came from."""

import pytest
import torch
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.mem_cache.deepseek_v4_memory_pool import DeepSeekV4TokenToKVPool
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool

from sglang_ddtree_patch.attention.layer_options import (
    UNSERVED_EXTRAS,
    check_layers,
    check_pool,
    layer_options,
    refuse_extras,
)
from sglang_ddtree_patch.errors import ConfigurationError


def model_with(**settings) -> torch.nn.Module:
    layers = [
        RadixAttention(4, 64, 0.125, 2, layer_id=0),
        RadixAttention(4, 64, 0.125, 2, layer_id=1, **settings),
    ]
    return torch.nn.Sequential(*layers)


def bare(pool_class: type, **attributes) -> object:
    """A pool that holds nothing but the attributes given."""
    pool = object.__new__(pool_class)
    pool.__dict__.update(attributes)
    return pool


@pytest.mark.parametrize("settings", [{}, {"sliding_window_size": 16}])
def test_layers_that_see_the_whole_prefix_or_a_window_are_served(settings):
    check_layers(model_with(**settings))


def test_a_layer_that_sees_chunks_is_refused_by_number():
    with pytest.raises(ConfigurationError, match=r"layer 1 .* chunk .*DFLASH"):
        check_layers(model_with(use_irope=True))


def test_a_pool_that_keeps_window_layers_otherwise_is_refused_by_name():
    check_pool(bare(SWAKVPool))
    check_pool(bare(MLATokenToKVPool))
    with pytest.raises(ConfigurationError, match=r"DeepSeekV4TokenToKVPool.*DFLASH"):
        check_pool(bare(DeepSeekV4TokenToKVPool))


@pytest.mark.parametrize("name", UNSERVED_EXTRAS)
def test_what_would_change_the_result_of_attention_is_refused_by_name(name):
    layer = model_with()[1]
    refuse_extras(layer, {name: None, "harmless": 1})
    with pytest.raises(ConfigurationError, match=rf"layer 1 attends with {name}"):
        refuse_extras(layer, {name: torch.ones(1)})


def test_only_the_window_layers_of_a_hybrid_are_mapped_to_their_own_pool():
    slots = torch.arange(8)
    pool = bare(
        SWAKVPool, layers_mapping={0: (0, False), 1: (0, True)}, full_to_swa_index_mapping=slots,
        dtype=torch.bfloat16,
    )  # fmt: skip
    full, window = model_with(sliding_window_size=16)
    assert layer_options(full, pool, None) == {}
    options = layer_options(window, pool, None)
    assert options.keys() == {"slot_map", "window"}
    assert options["slot_map"] is slots
    assert options["window"] == 16


@pytest.mark.parametrize(
    ("dtype", "options"),
    [(torch.float8_e4m3fn, {"k_scale": 0.5, "v_scale": 2.0}), (torch.bfloat16, {})],
)
def test_scales_are_those_of_a_float8_pool_alone(dtype, options):
    """A checkpoint may hold scales for a pool that does not need them."""
    layer = model_with()[1]
    layer.k_scale_float, layer.v_scale_float = 0.5, 2.0
    assert layer_options(layer, bare(MHATokenToKVPool, dtype=dtype), None) == options


def test_scaled_latents_are_refused():
    layer, pool = model_with()[1], bare(MLATokenToKVPool, dtype=torch.float8_e4m3fn)
    layer.k_scale_float = layer.v_scale_float = 1.0
    layer_options(layer, pool, None)
    layer.k_scale_float = 0.5
    with pytest.raises(ConfigurationError, match=r"layer 1 scales its float8 latents by 0\.5"):
        layer_options(layer, pool, None)
