"""Four-bit targets of the tests hold the weights they were made from, to half a step."""

from __future__ import annotations

import torch
from quantized_targets import GROUP, int4, packed, unpacked
from safetensors.torch import load_file

from sglang_ddtree_patch import model_catalog


def test_packed_weights_are_off_by_half_a_step_at_most() -> None:
    weight = torch.randn(64, 2 * GROUP, generator=torch.Generator().manual_seed(0))
    layer = packed(weight)
    assert layer["qweight"].shape == (2 * GROUP // 8, 64)
    assert layer["qzeros"].shape == (2, 64 // 8)
    assert set(layer["qzeros"].flatten().tolist()) == {0x77777777}
    steps = layer["scales"][layer["g_idx"].long()].float().T
    assert ((unpacked(layer) - weight).abs() <= 0.51 * steps).all()


def test_a_target_keeps_everything_but_its_linear_layers(tmp_path) -> None:
    source = model_catalog.path("tiny-gqa") / "target"
    folder = int4(source, tmp_path / "target")
    before, after = (load_file(path / "model.safetensors") for path in (source, folder))
    layer = "model.layers.0.mlp.down_proj"
    parts = ("qweight", "qzeros", "scales", "g_idx")
    found = unpacked({part: after[f"{layer}.{part}"] for part in parts})
    assert torch.allclose(found, before[f"{layer}.weight"].float(), atol=0.05)
    kept = [name for name in before if name in after]
    assert "model.embed_tokens.weight" in kept
    assert all(torch.equal(before[name], after[name]) for name in kept)
    assert not any(name.endswith("proj.weight") for name in after)
