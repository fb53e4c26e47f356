"""Shapes that need no weights: configs that fit each other, and the KV their layers hold."""

import pytest

from sglang_ddtree_patch.launch.doctor.check import Status
from sglang_ddtree_patch.launch.doctor.models import ModelConfig, check_pair, read_config
from sglang_ddtree_patch.launch.kv_bytes import element_bytes, kv_bytes_a_step, tensor_parallel_size
from sglang_ddtree_patch.launch.model_shapes import SHAPES, write_shape


@pytest.mark.parametrize("name", SHAPES)
def test_a_shape_s_drafter_fits_its_target(name, tmp_path):
    write_shape(name, tmp_path)
    checks = check_pair(str(tmp_path / "target"), str(tmp_path / "draft"))
    assert [check for check in checks if check.status is not Status.OK] == []


def config(**values) -> ModelConfig:
    return ModelConfig("folder", values)


@pytest.mark.parametrize(
    ("shape", "each"), [("qwen3-8b-shapes", 36 * 2 * 8 * 128), ("deepseek-v2-lite-shapes", 27 * (512 + 64))]
)
def test_every_layer_reads_the_whole_prefix_once(shape, each, tmp_path):
    write_shape(shape, tmp_path)
    target = read_config(str(tmp_path / "target"))
    assert kv_bytes_a_step(target, 1000, 2) == 1000 * 2 * each


def test_a_window_bounds_what_its_layers_read():
    layers = ["full_attention", "sliding_attention", "sliding_attention"]
    drafter = config(
        num_hidden_layers=3, layer_types=layers, sliding_window=100, num_attention_heads=4, head_dim=64
    )
    assert kv_bytes_a_step(drafter, 1000, 2) == 2 * 2 * 4 * 64 * (1000 + 100 + 100)
    assert kv_bytes_a_step(drafter, 50, 2) == 2 * 2 * 4 * 64 * 150


def test_gpus_of_a_group_share_heads_but_not_latents():
    heads = config(num_hidden_layers=1, num_attention_heads=16, num_key_value_heads=4, hidden_size=1024)
    latent = config(num_hidden_layers=1, kv_lora_rank=512, qk_rope_head_dim=64)
    assert [kv_bytes_a_step(heads, 1, 2, size) for size in (1, 2, 8)] == [1024, 512, 256]
    assert [kv_bytes_a_step(latent, 1, 2, size) for size in (1, 8)] == [1152, 1152]


@pytest.mark.parametrize(
    ("flags", "size"),
    [
        ({}, 2),
        ({"--dtype": "float32"}, 4),
        ({"--dtype": "float32", "--kv-cache-dtype": "fp8_e4m3"}, 1),
        ({"--kv-cache-dtype": "bf16", "--dtype": "float32"}, 2),
    ],
)
def test_flags_say_how_wide_a_cached_number_is(flags, size):
    assert element_bytes(config(torch_dtype="bfloat16"), flags) == size


def test_the_size_of_a_group_has_three_names():
    assert [tensor_parallel_size(flags) for flags in ({}, {"--tp": "2"}, {"--tp-size": "4"})] == [1, 2, 4]
