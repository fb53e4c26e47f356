"""`ddtree doctor` on two models: each way in which a drafter may not fit is found, and only that."""

import json
from pathlib import Path

import pytest

from sglang_ddtree_patch import model_catalog
from sglang_ddtree_patch.launch.doctor.check import Status
from sglang_ddtree_patch.launch.doctor.models import check_pair

YARN = {"rope_type": "yarn", "factor": 4.0}
# What is changed in the target's or the drafter's config, which check sees it, how, and in what words.
MISFITS = {
    "not a drafter": ("draft", {"architectures": ["Qwen3Model"]}, "drafter", "problem", "Qwen3Model is no"),
    "no architecture": ("draft", {"architectures": None}, "drafter", "problem", "no architecture"),
    "a Domino head": ("draft", {"projector_type": "domino"}, "drafter", "problem", "Domino"),
    "a selector": ("dflash", {"selector_rank": 64}, "drafter", "problem", "selector"),
    "recurrent layers": (
        "target", {"layer_types": ["linear_attention", "full_attention"]},
        "target attention", "problem", "linear_attention",
    ),
    "a window in the target": (
        "target", {"sliding_window": 512, "use_sliding_window": True}, "target attention", "warning", "512",
    ),
    "another hidden size": ("draft", {"hidden_size": 64}, "hidden size", "problem", "drafter 64, target 128"),
    "another vocabulary": ("draft", {"vocab_size": 512}, "vocabulary", "problem", "drafter 512, target 768"),
    "a block of one": ("draft", {"block_size": 1}, "block size", "problem", "1 cannot be drafted"),
    "a block too large": ("dflash", {"block_size": 64}, "block size", "problem", "64 cannot be drafted"),
    "no block": ("draft", {"block_size": None}, "block size", "warning", "takes 16"),
    "a layer too deep": (
        "dflash", {"target_layer_ids": [0, 4]}, "target layers", "problem", "the target has 0 to 3",
    ),
    "a negative layer": ("dflash", {"target_layer_ids": [-1]}, "target layers", "problem", "names no layers"),
    "no layer": ("dflash", {"target_layer_ids": []}, "target layers", "problem", "names no layers"),
    "a deeper target": ("target", {"num_hidden_layers": 6}, "target layers", "warning", "this has 6"),
    "a mask outside the vocabulary": (
        "dflash", {"mask_token_id": 768}, "mask token", "problem", "768 is not one of",
    ),
    "no mask": ("dflash", {"mask_token_id": None}, "mask token", "warning", "no id"),
    "a longer target": (
        "target", {"max_position_embeddings": 8192}, "context length", "problem", "drafter 4096, target 8192",
    ),
    "a stretched target": ("target", {"rope_scaling": YARN}, "context length", "problem", "target 16384"),
    "a stretched drafter": ("draft", {"rope_scaling": YARN}, "RoPE scaling", "warning", "drafter yarn x4.0"),
    "an unknown layer type": (
        "draft", {"layer_types": ["chunked_attention"] * 4}, "drafter window", "problem", "chunked_attention",
    ),
    "too few layer types": (
        "draft", {"layer_types": ["full_attention"]}, "drafter window", "problem", "1 layer_types for 4",
    ),
    "a window without a size": (
        "draft", {"layer_types": ["sliding_attention"] * 4},
        "drafter window", "problem", "sliding_window=None",
    ),
    "no hidden size": ("target", {"hidden_size": None}, "models", "problem", "hidden_size=None"),
}  # fmt: skip


def write_pair(folder: Path, where: str = "", changes: dict | None = None) -> tuple[str, str]:
    """tiny-gqa's two configs in `folder`, one of them changed ("dflash": below `dflash_config`)."""
    model = model_catalog.entry("tiny-gqa")
    configs = {
        part: json.loads((source / "config.json").read_text())
        for part, source in (("target", model.target), ("draft", model.draft))
    }
    if changes is not None:
        (configs["draft"]["dflash_config"] if where == "dflash" else configs[where]).update(changes)
    for part, config in configs.items():
        (folder / part).mkdir()
        (folder / part / "config.json").write_text(json.dumps(config))
    return str(folder / "target"), str(folder / "draft")


@pytest.mark.parametrize(("where", "changes", "name", "status", "found"), MISFITS.values(), ids=MISFITS)
def test_a_drafter_that_does_not_fit_is_found(where, changes, name, status, found, tmp_path):
    checks = {check.name: check for check in check_pair(*write_pair(tmp_path, where, changes))}
    assert checks[name].status == status
    assert found in checks[name].found
    assert checks[name].advice
    others = [check for check in checks.values() if check.status is not Status.OK]
    assert {check.name for check in others} == {name}


def test_a_drafter_with_sliding_layers_and_positions_to_spare_fits(tmp_path):
    changes = {
        "layer_types": ["sliding_attention"] * 3 + ["full_attention"], "sliding_window": 512,
        "max_position_embeddings": 8192,
    }  # fmt: skip
    checks = {check.name: check for check in check_pair(*write_pair(tmp_path, "draft", changes))}
    assert {check.status for check in checks.values()} == {Status.OK}
    assert checks["drafter window"].found == "512 in 3 of 4 layers"


def test_a_target_whose_language_model_lies_below_text_config_is_read(tmp_path):
    target, draft = write_pair(tmp_path)
    config = tmp_path / "target" / "config.json"
    config.write_text(json.dumps({"architectures": ["X"], "text_config": json.loads(config.read_text())}))
    assert {check.status for check in check_pair(target, draft)} == {Status.OK}


@pytest.mark.parametrize("content", [None, "{", "[]"], ids=["no file", "broken", "no object"])
def test_a_config_that_cannot_be_read_is_named(content, tmp_path):
    target, draft = write_pair(tmp_path)
    file = tmp_path / "draft" / "config.json"
    file.unlink() if content is None else file.write_text(content)
    (check,) = check_pair(target, draft)
    assert (check.status, str(file) in check.found) == (Status.PROBLEM, True)


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("nobody/no-such-model", "hf download nobody/no-such-model config.json"),
        ("/nowhere/model", "/nowhere/model is no folder."),
        ("./nowhere", "./nowhere is no folder."),
        ("owner/model/file.gguf", "hf download owner/model/file.gguf config.json"),
    ],
)
def test_a_model_that_is_not_on_this_machine_is_said_with_what_to_type(path, said):
    (check,) = check_pair(path, path)
    assert check.status is Status.PROBLEM
    assert said in check.found
