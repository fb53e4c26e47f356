"""The choice of kernel: by device and shapes, forced by the setting, never one that cannot serve."""

import itertools

import pytest
import torch

from sglang_ddtree_patch.attention import kernel_choice as attention_kernel
from sglang_ddtree_patch.attention.kernel_choice import (
    ANY,
    FA3,
    FLASHMLA,
    HOPPER,
    KERNEL_VARIABLE,
    MLA_NARROW,
    PREFERENCES,
    REFERENCE,
    TRITON,
    Preference,
    build_attention,
    choose_kernel,
    own_kernel,
)
from sglang_ddtree_patch.errors import ConfigurationError
from sglang_ddtree_patch.kernels.attention.verify_attention import AttentionShape

GQA = AttentionShape(32, 8, 128, 128, value_is_key=False, dtype=torch.bfloat16)
WIDE = AttentionShape(16, 8, 256, 256, value_is_key=False, dtype=torch.bfloat16)
MLA = AttentionShape(8, 1, 576, 512, value_is_key=True, dtype=torch.bfloat16)
FLOAT = AttentionShape(8, 1, 576, 512, value_is_key=True, dtype=torch.float32)
WINDOWED = AttentionShape(32, 8, 128, 128, value_is_key=False, dtype=torch.bfloat16, windowed=True)
FLOAT8 = AttentionShape(32, 8, 128, 128, value_is_key=False, dtype=torch.float8_e4m3fn)
FLOAT8_MLA = AttentionShape(8, 1, 576, 512, value_is_key=True, dtype=torch.float8_e4m3fn)


# A table of the tests' own: the real one follows measurements.
TABLE = {
    ("hopper", "gqa"): [Preference((HOPPER,), rows=132), Preference((FA3, HOPPER))],
    ("hopper", "gqa-wide"): [Preference((FA3, HOPPER))],
    ("hopper", "mla"): [Preference((HOPPER, FLASHMLA), positions=4096), Preference((FLASHMLA, HOPPER))],
}
LONG = 65536


@pytest.fixture(autouse=True)
def packages_are_there(monkeypatch):
    monkeypatch.setattr(attention_kernel, "PREFERENCES", TABLE)
    monkeypatch.delenv(KERNEL_VARIABLE, raising=False)
    monkeypatch.setattr(attention_kernel, "missing_package", lambda kernel: None)


@pytest.fixture
def gpu(monkeypatch):
    """A function that makes the GPU one of a compute capability."""

    def of(*capability: int) -> None:
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
        monkeypatch.setattr(torch.version, "hip", None)

    return of


@pytest.mark.parametrize(
    ("capability", "shape", "page_size", "rows", "kernel"),
    [
        ((9, 0), GQA, 64, 33, HOPPER),
        ((9, 0), GQA, 64, 34, FA3),
        ((9, 0), GQA, 16, 17, TRITON),  # Hopper's kernel takes pages of 64
        ((9, 0), GQA, 16, 64, FA3),
        ((9, 0), WIDE, 64, 17, FA3),
        ((9, 0), MLA, 64, 9, FLASHMLA),
        ((9, 0), MLA, 128, 9, HOPPER),  # FlashMLA takes pages of 64 alone
        ((9, 0), MLA, 1, 9, TRITON),
        ((9, 0), FLOAT, 64, 9, TRITON),
        ((9, 0), WINDOWED, 64, 9, TRITON),
        ((9, 0), FLOAT8, 64, 64, TRITON),
        ((9, 0), FLOAT8_MLA, 64, 9, TRITON),
        ((8, 0), GQA, 64, 64, TRITON),
        ((10, 0), MLA, 64, 9, TRITON),
        ((12, 0), GQA, 64, 64, TRITON),
    ],
)
def test_the_table_chooses_by_device_heads_page_and_rows(gpu, capability, shape, page_size, rows, kernel):
    gpu(*capability)
    assert choose_kernel("cuda", shape, page_size, rows, LONG) == kernel
    ours = choose_kernel("cuda", shape, page_size, rows, LONG, vendors=False)
    assert ours in (HOPPER, TRITON)
    assert kernel in (FA3, FLASHMLA, ours)


def test_without_a_vendors_package_ours_serve(gpu, monkeypatch):
    gpu(9, 0)
    monkeypatch.setattr(attention_kernel, "missing_package", lambda kernel: f"no {kernel}")
    assert choose_kernel("cuda", GQA, 64, 64, LONG) == HOPPER
    assert choose_kernel("cuda", MLA, 64, 9, LONG) == HOPPER
    assert choose_kernel("cuda", GQA, 16, 64, LONG) == TRITON


def test_a_machine_without_a_gpu_runs_the_reference(monkeypatch):
    assert own_kernel("cpu") == choose_kernel("cpu", GQA, 64, 9, LONG) == REFERENCE
    monkeypatch.setenv(KERNEL_VARIABLE, TRITON)
    assert own_kernel("cpu") == choose_kernel("cpu", GQA, 64, 9, LONG) == TRITON
    monkeypatch.setenv(KERNEL_VARIABLE, FA3)
    with pytest.raises(ConfigurationError, match="=fa3 needs an NVIDIA GPU"):
        choose_kernel("cpu", GQA, 64, 9, LONG)


def test_the_setting_forces_a_kernel_that_can_serve(gpu, monkeypatch):
    gpu(9, 0)
    for kernel, shape in (
        (FA3, GQA),
        (FLASHMLA, MLA),
        (TRITON, MLA),
        (REFERENCE, GQA),
        (HOPPER, GQA),
        (MLA_NARROW, MLA),
    ):
        monkeypatch.setenv(KERNEL_VARIABLE, kernel)
        assert choose_kernel("cuda", shape, 64, 9, LONG) == kernel


@pytest.mark.parametrize(
    ("kernel", "capability", "shape", "page_size", "reason"),
    [
        (FA3, (9, 0), MLA, 64, "no kernel for heads of 576/512"),
        (FA3, (12, 0), GQA, 64, "and this is 12.0"),
        (FLASHMLA, (9, 0), MLA, 16, "pages of 64, and --page-size is 16"),
        (FLASHMLA, (9, 0), GQA, 64, "MLA heads of 576/512"),
        (HOPPER, (8, 0), GQA, 64, "compute capability 9.0"),
        (HOPPER, (9, 0), GQA, 16, "pages of 64"),
        (MLA_NARROW, (10, 0), MLA, 64, "compute capability 9.0, and this is 10.0"),
        (MLA_NARROW, (9, 0), GQA, 64, "MLA heads of 576/512"),
        (MLA_NARROW, (9, 0), MLA, 1, "pages of whole 16 positions, and --page-size is 1"),
        (FA3, (9, 0), WINDOWED, 64, "only triton and reference serve sliding windows"),
    ],
)
def test_a_forced_kernel_that_cannot_serve_is_refused_in_words(
    gpu, monkeypatch, kernel, capability, shape, page_size, reason
):
    gpu(*capability)
    monkeypatch.setenv(KERNEL_VARIABLE, kernel)
    with pytest.raises(ConfigurationError, match=rf"{KERNEL_VARIABLE}={kernel} cannot serve .*{reason}"):
        choose_kernel("cuda", shape, page_size, 9, LONG)


def test_a_server_of_short_contexts_may_run_another_kernel(gpu):
    gpu(9, 0)
    assert choose_kernel("cuda", MLA, 64, 9, 4096) == HOPPER
    assert choose_kernel("cuda", MLA, 64, 9, 4097) == FLASHMLA


def test_the_measured_table_names_kernels_of_sm_90_up_to_any_width_and_context():
    for preferences in PREFERENCES.values():
        assert preferences[-1].rows == preferences[-1].positions == ANY
        for earlier, later in itertools.pairwise(preferences):
            assert earlier.rows <= later.rows
            assert earlier.positions <= later.positions
            assert earlier[1:] != later[1:]
        assert {kernel for entry in preferences for kernel in entry.kernels} <= {HOPPER, FA3, FLASHMLA}


def test_a_name_that_is_no_kernel_is_refused_with_those_that_are(monkeypatch):
    monkeypatch.setenv(KERNEL_VARIABLE, "cutlass")
    with pytest.raises(
        ConfigurationError, match="auto, triton, hopper, mla-narrow, fa3, flashmla or reference"
    ):
        own_kernel("cpu")


def test_a_missing_package_is_said_in_words(monkeypatch):
    def missing(*arguments):
        raise ImportError("\nno such library\nat all")

    monkeypatch.undo()
    monkeypatch.setattr(attention_kernel, "build_attention", missing)
    attention_kernel.missing_package.cache_clear()
    assert "cannot be imported (no such library)" in attention_kernel.missing_package(FA3)
    attention_kernel.missing_package.cache_clear()


def test_an_implementation_reads_the_batch_it_was_prepared_for():
    """The reference behind the interface: two forwards over one slot table."""
    slot_table = torch.arange(64, dtype=torch.int32).view(2, 32)
    shape = AttentionShape(2, 1, 16, 16, value_is_key=False, dtype=torch.float32)
    attention = build_attention(REFERENCE, slot_table, shape, 16)
    keys, query = torch.randn(64, 1, 16), torch.randn(3, 2, 16)
    attention.reserve(4, 3)
    results = []
    for request in (0, 1):
        attention.prepare(torch.tensor([request]), torch.tensor([7]), 3)
        results.append(attention.attend(query, keys, keys, None, softmax_scale=1.0))
    assert not torch.equal(*results)
