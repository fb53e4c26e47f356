"""What the catalog promises about the committed models."""

import json

import pytest

from sglang_ddtree_patch import model_catalog
from sglang_ddtree_patch.cli import main
from sglang_ddtree_patch.errors import ConfigurationError


@pytest.mark.parametrize("name", model_catalog.names())
def test_a_named_model_has_a_target_and_a_drafter_that_fit_together(name):
    model = model_catalog.entry(name)
    target = json.loads((model.target / "config.json").read_text())
    draft = json.loads((model.draft / "config.json").read_text())
    assert draft["hidden_size"] == target["hidden_size"]
    assert draft["vocab_size"] == target["vocab_size"]
    assert draft["num_target_layers"] == target["num_hidden_layers"]
    # SGLang records the input of layer k + 1, so the last layer cannot feed the drafter.
    assert max(draft["dflash_config"]["target_layer_ids"]) < target["num_hidden_layers"] - 1
    vocabulary = json.loads((model.target / "tokenizer.json").read_text())["model"]["vocab"]
    special = json.loads((model.target / "tokenizer.json").read_text())["added_tokens"]
    ids = {token["content"]: token["id"] for token in special} | vocabulary
    assert ids[draft["dflash_config"]["mask_token"]] == draft["dflash_config"]["mask_token_id"]
    assert max(ids.values()) < target["vocab_size"]


def test_all_committed_models_stay_under_eight_megabytes():
    files = [file for name in model_catalog.names() for file in model_catalog.path(name).rglob("*")]
    assert sum(file.stat().st_size for file in files if file.is_file()) < 8_000_000


def test_an_unknown_model_is_refused_with_the_names_there_are():
    with pytest.raises(ConfigurationError, match="tiny-gqa, tiny-mla"):
        model_catalog.path("kimi")


@pytest.mark.parametrize("words", [["models"], ["models", "path", "smollm2"], ["models", "smollm2"]])
def test_a_cache_in_nobodys_home_is_one_line(monkeypatch, capsys, words):
    monkeypatch.setenv("DDTREE_CACHE", "~nobody-of-that-name/cache")
    assert main(words) in (1, 2)
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.endswith("in no home folder that is known here: set DDTREE_CACHE to a folder that is.\n")
    assert said.err.count("\n") == 1


def test_the_command_prints_the_folder_and_refuses_unknown_names(capsys):
    assert main(["models", "path", "tiny-mla"]) == 0
    assert capsys.readouterr().out.strip() == str(model_catalog.path("tiny-mla"))
    assert main(["models", "path", "kimi"]) == 2
    assert "tiny-gqa" in capsys.readouterr().err
    assert main(["models"]) == 0
    assert "tiny-mla" in capsys.readouterr().out
