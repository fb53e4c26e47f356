"""Which models the demo offers, and how it puts a question to them."""

from pathlib import Path

import pytest

from sglang_ddtree_patch import cli, model_catalog
from sglang_ddtree_patch.launch import demo, demo_models
from sglang_ddtree_patch.launch.int8_rows import PACKED


@pytest.fixture
def packed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder where the package would have SmolLM2's drafter, with one in it."""
    folder = tmp_path / "packed"
    folder.mkdir()
    (folder / PACKED).touch()
    monkeypatch.setattr(model_catalog, "packed_drafter", lambda name: folder)
    monkeypatch.setenv(model_catalog.CACHE_VARIABLE, str(tmp_path / "cache"))
    return folder


def test_a_model_without_a_drafter_is_not_offered(packed):
    assert demo_models.names() == (*model_catalog.names(), "smollm2")
    (packed / PACKED).unlink()
    assert demo_models.names() == model_catalog.names()


@pytest.mark.parametrize(("on_gpu", "expected"), [(True, "smollm2"), (False, "tiny-gqa")])
def test_the_model_that_talks_is_the_default_on_a_gpu_alone(packed, monkeypatch, on_gpu, expected):
    monkeypatch.setattr(demo_models, "has_accelerator", lambda: on_gpu)
    assert demo_models.default_name() == expected
    (packed / PACKED).unlink()
    assert demo_models.default_name() == "tiny-gqa"


def test_a_model_that_cannot_be_prepared_is_one_line_and_a_way_on(packed, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(demo, "require_sglang", lambda _: True)
    (tmp_path / "cache").touch()  # where a folder would have to be
    assert cli.main(["demo", "--model", "smollm2"]) == 1
    said = capsys.readouterr().err
    assert "cannot be written" in said
    assert "ddtree demo --model tiny-gqa" in said


@pytest.mark.parametrize("name", model_catalog.names())
def test_a_question_is_rendered_by_the_models_own_template(name):
    turn = demo_models.demo_model(name, print).turn()
    assert turn("What is a queue?") == "<|bos|><|user|>\nWhat is a queue?<|end|>\n<|assistant|>\n"
