"""arguments.py and settings.py: what is refused, in which words, and what SGLang's own resolution ends in."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from resolve_arguments import Outcome, resolve

from sglang_ddtree_patch import arguments, draft_config
from sglang_ddtree_patch.errors import ConfigurationError
from sglang_ddtree_patch.settings import MAX_WIDTH, candidates_per_position, widths_are_chosen

DRAFT = {
    "architectures": ["DFlashDraftModel"],
    "model_type": "qwen3",
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "intermediate_size": 64,
    "max_position_embeddings": 512,
    "block_size": 8,
    "num_target_layers": 2,
    "dflash_config": {"mask_token_id": 3, "target_layer_ids": [0]},
}
TARGET = {
    **{key: DRAFT[key] for key in DRAFT if key not in ("block_size", "num_target_layers", "dflash_config")},
    "architectures": ["Qwen3ForCausalLM"],
    "num_hidden_layers": 2,
    "torch_dtype": "float32",
}


def model_folder(folder: Path, config: dict) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


@pytest.fixture
def draft(tmp_path) -> str:
    return model_folder(tmp_path / "draft", DRAFT)


def config(**changes) -> SimpleNamespace:
    """The server arguments that are read, as SGLang leaves them where the user says nothing."""
    return SimpleNamespace(**{
        "attention_backend": None,
        "decode_attention_backend": None,
        "pp_size": 1,
        "tp_size": 1,
        "enable_dp_attention": False,
        "page_size": None,
        "disaggregation_mode": "null",
        "dcp_size": 1,
        "enable_two_batch_overlap": False,
        "enable_pdmux": False,
        "enable_lora": None,
        "lora_paths": None,
        "enable_strict_thinking": False,
        "grammar_backend": None,
        "enable_deterministic_inference": False,
        "kv_cache_dtype": "auto",
        "trust_remote_code": False,
        "json_model_override_args": "{}",
        "enable_mixed_chunk": False,
        "enable_streaming_session": False,
        "speculative_use_block_verification": False,
        "speculative_accept_threshold_single": 1.0,
        "speculative_accept_threshold_acc": 1.0,
        "speculative_num_steps": None,
        "speculative_adaptive": False,
        "speculative_draft_window_size": None,
        "speculative_eagle_topk": None,
        "speculative_num_draft_tokens": None,
        "speculative_dflash_block_size": None,
        "speculative_draft_model_path": "/draft",
        "speculative_draft_model_revision": None,
        **changes,
    })


# Features.


def test_a_plain_ddtree_server_is_accepted():
    arguments.check_features(config())
    arguments.check_features(config(decode_attention_backend="ddtree-verify", speculative_eagle_topk=1))
    arguments.check_features(config(attention_backend="triton", decode_attention_backend="triton"))


@pytest.mark.parametrize(
    ("changes", "asked", "what_to_type"),
    [
        ({"speculative_draft_model_path": None}, "DFlash drafter", "--speculative-draft-model-path PATH"),
        ({"decode_attention_backend": "fa3"}, "--decode-attention-backend fa3", "--attention-backend"),
        ({"page_size": 0}, "--page-size 0", "type 1, 16, 32 or 64"),
        ({"pp_size": 2}, "--pp-size 2", "leave it out"),
        ({"enable_dp_attention": True}, "--enable-dp-attention", "leave it out"),
        ({"disaggregation_mode": "decode"}, "--disaggregation-mode decode", "leave it out"),
        ({"dcp_size": 2}, "--dcp-size 2", "leave it out"),
        ({"enable_two_batch_overlap": True}, "--enable-two-batch-overlap", "leave it out"),
        ({"enable_pdmux": True}, "--enable-pdmux", "leave it out"),
        ({"enable_lora": True}, "--enable-lora", "leave it out"),
        ({"lora_paths": ["a"]}, "--enable-lora", "leave it out"),
        ({"enable_strict_thinking": True}, "--enable-strict-thinking", "leave it out"),
        ({"enable_streaming_session": True}, "--enable-streaming-session", "leave it out"),
        ({"grammar_backend": "outlines"}, "--grammar-backend outlines", "leave it out"),
        ({"speculative_adaptive": True}, "--speculative-adaptive", "leave it out"),
        ({"enable_mixed_chunk": True}, "--enable-mixed-chunk", "leave it out"),
        ({"speculative_use_block_verification": True}, "--speculative-use-block", "leave it out"),
        ({"speculative_num_steps": 5}, "--speculative-num-steps 5", "leave it out"),
        ({"speculative_accept_threshold_single": 0.5}, "threshold-single 0.5", "leave it out"),
        ({"speculative_accept_threshold_acc": 0.9}, "threshold-acc 0.9", "leave it out"),
        ({"speculative_draft_window_size": 0}, "--speculative-draft-window-size 0", "leave it out"),
        ({"enable_deterministic_inference": True}, "--enable-deterministic-inference", "leave it out"),
        ({"kv_cache_dtype": "nvfp4"}, "--kv-cache-dtype nvfp4", "leave it out"),
        ({"speculative_eagle_topk": 4}, "--speculative-eagle-topk 4", "SGLANG_DDTREE_TOPK"),
    ],
    ids=lambda value: ",".join(value) if isinstance(value, dict) else "",
)
def test_a_refused_feature_is_named_with_what_to_type(changes, asked, what_to_type):
    with pytest.raises(ConfigurationError) as refused:
        arguments.check_features(config(**changes))
    assert asked in str(refused.value)
    assert what_to_type in str(refused.value)
    assert "\n" not in str(refused.value)


# Candidates a position.


@pytest.mark.parametrize(("text", "number"), [(None, 8), ("1", 1), ("64", 64), (" 8 ", 8), ("008", 8)])
def test_candidates_come_from_the_environment(monkeypatch, text, number):
    monkeypatch.delenv("SGLANG_DDTREE_TOPK", raising=False)
    if text is not None:
        monkeypatch.setenv("SGLANG_DDTREE_TOPK", text)
    assert candidates_per_position() == number


@pytest.mark.parametrize("text", ["", " ", "0", "65", "-1", "abc", "8.0", "1e1", "8,8", "٣", "²", "9" * 5000])
def test_other_candidates_are_refused_before_a_model_loads(monkeypatch, text):
    monkeypatch.setenv("SGLANG_DDTREE_TOPK", text)
    with pytest.raises(ConfigurationError) as refused:
        arguments.check_features(config())
    message = str(refused.value)
    assert "SGLANG_DDTREE_TOPK=" in message
    assert "1 to 64" in message
    assert "unset it for 8" in message


# Widths.


@pytest.mark.parametrize(("text", "is_chosen"), [(None, False), ("fixed", False), ("auto", True)])
def test_whether_widths_are_chosen_comes_from_the_environment(monkeypatch, text, is_chosen):
    monkeypatch.delenv("SGLANG_DDTREE_WIDTHS", raising=False)
    if text is not None:
        monkeypatch.setenv("SGLANG_DDTREE_WIDTHS", text)
    assert widths_are_chosen() is is_chosen
    arguments.check_features(config())


@pytest.mark.parametrize("text", ["", "Auto", "1", "8,16", "adaptive"])
def test_other_ways_are_refused_before_a_model_loads(monkeypatch, text):
    monkeypatch.setenv("SGLANG_DDTREE_WIDTHS", text)
    with pytest.raises(ConfigurationError, match=r"SGLANG_DDTREE_WIDTHS=.* set it to fixed .* or auto"):
        arguments.check_features(config())


# Width and block.


def test_width_and_block_default_to_16_and_the_drafters_own(draft):
    block = arguments.resolve_block(config(speculative_draft_model_path=draft))
    assert block["speculative_num_draft_tokens"] == 16
    assert block["speculative_dflash_block_size"] == 8


@pytest.mark.parametrize("width", [1, 2, 17, 64, MAX_WIDTH])
def test_a_width_in_range_is_taken_as_asked(draft, width):
    cfg = config(speculative_draft_model_path=draft, speculative_num_draft_tokens=width)
    assert arguments.resolve_block(cfg)["speculative_num_draft_tokens"] == width


@pytest.mark.parametrize("width", [0, -1, MAX_WIDTH + 1])
def test_a_width_out_of_range_is_refused_with_the_range(draft, width):
    cfg = config(speculative_draft_model_path=draft, speculative_num_draft_tokens=width)
    with pytest.raises(ConfigurationError) as refused:
        arguments.resolve_block(cfg)
    assert f"--speculative-num-draft-tokens {width}" in str(refused.value)
    assert f"from 1 to {MAX_WIDTH}" in str(refused.value)


@pytest.mark.parametrize("block", [2, 16, 32])
def test_a_block_in_range_is_taken_as_asked(draft, block):
    cfg = config(speculative_draft_model_path=draft, speculative_dflash_block_size=block)
    assert arguments.resolve_block(cfg)["speculative_dflash_block_size"] == block


@pytest.mark.parametrize("block", [-1, 0, 1, 33])
def test_a_block_out_of_range_is_refused_with_the_range_and_the_drafters_own(draft, block):
    cfg = config(speculative_draft_model_path=draft, speculative_dflash_block_size=block)
    with pytest.raises(ConfigurationError) as refused:
        arguments.resolve_block(cfg)
    assert f"block of {block} positions" in str(refused.value)
    assert "--speculative-dflash-block-size takes 2 to 32" in str(refused.value)
    assert "trained with 8" in str(refused.value)


# The drafter.


def test_a_drafter_that_names_no_block_size_has_the_usual_one(tmp_path):
    without = {key: value for key, value in DRAFT.items() if key != "block_size"}
    path = model_folder(tmp_path, without)
    assert draft_config.trained_block_size(config(speculative_draft_model_path=path)) == 16


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({"architectures": ["Qwen3ForCausalLM"]}, "Qwen3ForCausalLM"),
        ({"architectures": ["LlamaForCausalLMEagle3"]}, "LlamaForCausalLMEagle3"),
        ({"architectures": None}, "no architecture"),
    ],
    ids=str,
)
def test_a_draft_model_that_is_not_dflash_is_refused_with_what_it_is(tmp_path, changes, found):
    path = model_folder(tmp_path, {**DRAFT, **changes})
    with pytest.raises(ConfigurationError) as refused:
        draft_config.trained_block_size(config(speculative_draft_model_path=path))
    assert f"--speculative-draft-model-path {path}" in str(refused.value)
    assert found in str(refused.value)
    assert "DFlashDraftModel" in str(refused.value)


def test_a_drafter_with_a_domino_head_is_refused_with_an_algorithm_that_serves_it(tmp_path):
    head = {
        "projector_type": "domino", "shift_label": True, "pure_draft_prefix_len": 1,
        "gru_hidden_dim": 8, "emb_dim": 8,
    }
    path = model_folder(tmp_path, {**DRAFT, "dflash_config": {**DRAFT["dflash_config"], **head}})
    with pytest.raises(ConfigurationError, match=r"Domino .* serve it with DFLASH"):
        draft_config.trained_block_size(config(speculative_draft_model_path=path))


@pytest.mark.parametrize(
    "what", ["missing folder", "empty folder", "broken json", "unknown model type", "no architecture"]
)
def test_a_draft_config_that_cannot_be_read_is_one_line_with_the_reason(tmp_path, what):
    path = tmp_path / "draft"
    if what != "missing folder":
        path.mkdir()
    if what == "broken json":
        (path / "config.json").write_text("{")
    if what == "unknown model type":
        model_folder(path, {**DRAFT, "model_type": "nobody_knows"})
    if what == "no architecture":
        model_folder(path, {**DRAFT, "architectures": []})
    with pytest.raises(ConfigurationError) as refused:
        draft_config.trained_block_size(config(speculative_draft_model_path=str(path)))
    assert f"--speculative-draft-model-path {path}: no model config could be read" in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    "changes",
    [
        {"block_size": "eight"},
        {"block_size": 0},
        {"dflash_config": {"mask_token_id": -1}},
        {"dflash_config": {"target_layer_ids": []}},
        {"dflash_config": {"projector_type": "domino"}},
    ],
    ids=str,
)
def test_a_drafter_whose_config_makes_no_sense_is_one_line_with_the_reason(tmp_path, changes):
    path = model_folder(tmp_path, {**DRAFT, **changes})
    with pytest.raises(ConfigurationError) as refused:
        arguments.resolve_block(config(speculative_draft_model_path=path))
    assert path in str(refused.value) or "positions" in str(refused.value)
    assert "\n" not in str(refused.value)


# Backends and pages.


@pytest.mark.parametrize(
    ("asked", "prefill", "chosen"),
    [
        ("fa3", "triton", "fa3"),
        ("triton", "torch_native", "triton"),
        (None, "triton", "triton"),
        (None, "fa3", "fa3"),
        (None, "torch_native", "ddtree-verify"),
        (None, "a backend that cannot draft", "ddtree-verify"),
    ],
)
def test_the_drafter_gets_the_backend_asked_for_or_one_that_can_draft(asked, prefill, chosen):
    assert arguments.choose_draft_backend(asked, prefill) == chosen


@pytest.mark.parametrize("asked", ["torch_native", "no such backend"])
def test_a_draft_backend_that_cannot_draft_is_refused_with_those_that_can(asked):
    with pytest.raises(ConfigurationError, match=rf"{asked} cannot run .* one of .*triton"):
        arguments.choose_draft_backend(asked, "fa3")


@pytest.mark.parametrize(("tokens", "slots", "page"), [(None, 256, 64), (640, 256, 64), (36, 17, 1)])
def test_a_pool_with_room_for_a_round_is_accepted(tokens, slots, page):
    arguments.check_pool(tokens, slots, page)


def test_a_pool_without_room_for_one_round_is_refused_with_the_smallest_that_has():
    with pytest.raises(ConfigurationError, match=r"--max-total-tokens 512 .* at least 768"):
        arguments.check_pool(512, slots=256, page_size=128)


@pytest.mark.parametrize(("asked", "resolved"), [(None, 1), (None, 64), (16, 16), (1, 1)])
def test_a_page_size_in_force_as_asked_is_accepted(asked, resolved):
    arguments.check_page_size(asked, resolved)


def test_a_replaced_page_size_is_refused_with_the_one_that_works():
    with pytest.raises(ConfigurationError, match=r"--page-size 16 is not possible .* type --page-size 64"):
        arguments.check_page_size(asked=16, resolved=64)


@pytest.mark.parametrize(
    ("recurrent", "target", "reason"),
    [
        (object(), {}, "recurrent layers"),
        (None, {"is_hybrid_swa": True, "is_deepseek_v4_arch": True}, "compressed keys"),
        (None, {"attention_chunk_size": 8192}, "chunks"),
    ],
)
def test_a_target_that_is_not_served_is_sent_to_dflash(monkeypatch, recurrent, target, reason):
    monkeypatch.setattr(arguments, "mambaish_config", lambda model_config: recurrent)
    with pytest.raises(ConfigurationError, match=rf"{reason}.*--speculative-algorithm DFLASH"):
        arguments.check_model(model_config(**target))


@pytest.mark.parametrize("is_hybrid_swa", [False, True])
def test_a_target_with_full_and_with_window_layers_is_accepted(monkeypatch, is_hybrid_swa):
    monkeypatch.setattr(arguments, "mambaish_config", lambda model_config: None)
    arguments.check_model(model_config(is_hybrid_swa=is_hybrid_swa))


def model_config(**settings: object) -> SimpleNamespace:
    ordinary = {"is_hybrid_swa": False, "is_deepseek_v4_arch": False, "attention_chunk_size": None}
    return SimpleNamespace(**{**ordinary, **settings})


@pytest.mark.parametrize(
    ("drafters", "targets", "is_served"), [(64, 64, True), (None, 64, True), (64, 65, False), (0, 64, False)]
)
def test_a_drafter_of_another_vocabulary_is_refused_where_its_config_names_one(
    tmp_path, drafters, targets, is_served
):
    named = {key: value for key, value in DRAFT.items() if key != "vocab_size"}
    if drafters is not None:
        named["vocab_size"] = drafters
    cfg = config(speculative_draft_model_path=model_folder(tmp_path, named))
    if is_served:
        draft_config.check_vocabulary(cfg, targets)
    else:
        with pytest.raises(ConfigurationError, match=f"of {drafters} tokens.*target has {targets}"):
            draft_config.check_vocabulary(cfg, targets)


def test_the_vocabulary_is_read_from_what_was_fetched_and_no_hub_is_asked_again(monkeypatch):
    asked = []

    def get_config_dict(path, **options):
        asked.append(options)
        raise OSError("not a folder, and not in the cache")

    monkeypatch.setattr(draft_config.PretrainedConfig, "get_config_dict", get_config_dict)
    draft_config.check_vocabulary(config(speculative_draft_model_path="s3://bucket/draft"), 64)
    assert [options["local_files_only"] for options in asked] == [True]


# Whole command lines, through SGLang's own resolution on the CPU platform.

DDTREE = ["--speculative-algorithm", "DDTREE", "--speculative-draft-model-path", "DRAFT"]
OURS = ["--attention-backend", "ddtree-verify"]
DFLASH = [
    "--speculative-algorithm", "DFLASH", "--speculative-draft-model-path", "DRAFT",
    "--attention-backend", "triton", "--speculative-draft-attention-backend", "triton",
]
COMMAND_LINES = {
    "stock": {"argv": []},
    "stock, no plugin": {"argv": [], "plugin": False},
    "chain": {"argv": DFLASH},
    "chain, no plugin": {"argv": DFLASH, "plugin": False},
    "backend alone": {"argv": OURS},
    "tree": {"argv": DDTREE},
    "tree, backend named": {"argv": [*DDTREE, *OURS]},
    "tree, lower case": {"argv": ["--speculative-algorithm", "ddtree", *DDTREE[2:], *OURS]},
    "tree in front of triton": {"argv": [*DDTREE, "--attention-backend", "triton", "--page-size", "64"]},
    "tree, decode backend named": {"argv": [*DDTREE, "--decode-attention-backend", "ddtree-verify"]},
    "wide tree": {
        "argv": [
            *DDTREE, "--speculative-num-draft-tokens", "64", "--speculative-dflash-block-size", "4",
            "--max-running-requests", "3", "--speculative-draft-window-size", "128",
        ]
    },
    "mismatch, stock": {"argv": [], "mismatch": True},
    "mismatch, tree": {"argv": DDTREE, "mismatch": True},
    "mismatch, backend": {"argv": OURS, "mismatch": True},
    "no drafter": {"argv": DDTREE[:2]},
    "a drafter of another vocabulary": {"argv": ["DRAFT OF 65" if w == "DRAFT" else w for w in DDTREE]},
    "wrong candidates": {"argv": DDTREE, "environment": {"SGLANG_DDTREE_TOPK": "many"}},
}
RANDOM_FIELDS = {"random_seed", "port", "nccl_port"}


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory) -> dict[str, Outcome]:
    """Every command line above, resolved in one process."""
    folder = tmp_path_factory.mktemp("models")
    target = model_folder(folder / "target", TARGET)
    drafters = {
        "DRAFT": model_folder(folder / "draft", DRAFT),
        "DRAFT OF 65": model_folder(folder / "draft of 65", {**DRAFT, "vocab_size": 65}),
    }
    common = ["--model-path", target, "--device", "cpu", "--skip-tokenizer-init"]
    cases = [
        {**case, "argv": [*common, *(drafters.get(word, word) for word in case["argv"])]}
        for case in COMMAND_LINES.values()
    ]
    results = resolve(cases, {"SGLANG_PLATFORM": "ddtree_cpu", "OMP_NUM_THREADS": "1"})
    return dict(zip(COMMAND_LINES, results, strict=True))


def fields(outcome: Outcome, *names: str) -> list[str]:
    assert outcome.error is None, outcome.log[-2000:]
    return [outcome.fields[name] for name in names]


@pytest.mark.parametrize("name", ["stock", "chain"])
def test_a_server_that_does_not_ask_for_ddtree_resolves_as_without_the_plugin(outcomes, name):
    with_plugin, without = outcomes[name], outcomes[f"{name}, no plugin"]
    assert without.error is None, without.log[-2000:]
    assert with_plugin.error is None, with_plugin.log[-2000:]
    changed = {key for key in without.fields if with_plugin.fields[key] != without.fields[key]}
    assert changed - RANDOM_FIELDS == set()
    assert "ddtree" not in with_plugin.log.lower().replace("ddtree_cpu", "")


def test_the_backend_without_the_algorithm_serves_as_stock_and_says_so(outcomes):
    alone, stock = outcomes["backend alone"], outcomes["stock"]
    assert alone.error is None, alone.log[-2000:]
    changed = {key for key in stock.fields if alone.fields[key] != stock.fields[key]}
    assert changed - RANDOM_FIELDS == set()
    assert "serving with the attention backend SGLang chooses" in alone.log


@pytest.mark.parametrize(
    "name", ["tree", "tree, backend named", "tree, lower case", "tree, decode backend named"]
)
def test_trees_are_verified_in_front_of_the_backend_sglang_chooses(outcomes, name):
    prefill, decode, mode, draft_backend, algorithm = fields(
        outcomes[name], "prefill_attention_backend", "decode_attention_backend", "speculative_attention_mode",
        "speculative_draft_attention_backend", "speculative_algorithm",
    )
    assert fields(outcomes["stock"], "attention_backend") == [prefill] == ["'torch_native'"]
    assert (decode, mode, draft_backend) == ("'ddtree-verify'", "'decode'", "'ddtree-verify'")
    assert algorithm == "'DDTREE'"


def test_the_backend_asked_for_is_the_one_wrapped(outcomes):
    assert fields(
        outcomes["tree in front of triton"], "attention_backend", "prefill_attention_backend",
        "decode_attention_backend", "speculative_draft_attention_backend", "page_size",
    ) == ["'triton'", "'triton'", "'ddtree-verify'", "'triton'", "64"]


def test_a_tree_servers_page_size_is_the_one_stock_would_have(outcomes):
    assert fields(outcomes["tree, backend named"], "page_size") == fields(outcomes["stock"], "page_size")


def test_a_rounds_sizes_come_from_the_flags_and_the_drafter(outcomes):
    names = (
        "speculative_num_draft_tokens", "speculative_dflash_block_size", "speculative_num_steps",
        "speculative_eagle_topk", "max_running_requests", "speculative_draft_window_size",
    )
    assert fields(outcomes["tree"], *names) == ["16", "8", "1", "1", "48", "None"]
    assert fields(outcomes["wide tree"], *names) == ["64", "4", "1", "1", "3", "128"]
    assert "has no effect" not in outcomes["wide tree"].log


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("no drafter", "add --speculative-draft-model-path PATH"),
        ("a drafter of another vocabulary", "vocabulary of 65 tokens, and the target has 64"),
        ("wrong candidates", "SGLANG_DDTREE_TOPK='many'"),
    ],
)
def test_bad_input_is_a_configuration_error_before_a_model_loads(outcomes, name, words):
    assert outcomes[name].error_type == "ConfigurationError"
    assert words in outcomes[name].error


def test_an_sglang_that_does_not_match_refuses_ddtree_in_words_and_serves_everything_else(outcomes):
    stock, tree, backend = (outcomes[f"mismatch, {name}"] for name in ("stock", "tree", "backend"))
    assert stock.error is None, stock.log[-2000:]
    changed = {key for key, value in outcomes["stock"].fields.items() if stock.fields[key] != value}
    assert changed - RANDOM_FIELDS == set()
    for refused in (tree, backend):
        assert refused.error_type == "ConfigurationError", refused.log[-2000:]
        assert "SGLang 9.9.9 does not match" in refused.error
        assert "pip install sglang==0.5.23" in refused.error
