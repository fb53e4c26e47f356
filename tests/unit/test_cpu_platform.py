"""The CPU platform: silent unless named, and its torch replacements do what the GPU functions do."""

import os
import pkgutil
import types

import pytest
import torch
from sglang.kernels.ops.sampling.murmur_hash import murmur_hash32_kernel

from sglang_ddtree_patch.contract import CONTRACT, Use
from sglang_ddtree_patch.cpu import hooks as cpu_hooks
from sglang_ddtree_patch.cpu import platform as cpu_platform
from sglang_ddtree_patch.cpu.kv_pool import CpuMHATokenToKVPool, gather_cache_locs


@pytest.fixture
def registered(monkeypatch) -> list[str]:
    """Names what `activate` registers, instead of leaving it in this process's registry."""
    calls = []
    monkeypatch.setattr(cpu_platform, "register_cpu_hooks", lambda: calls.append("hooks"))
    for variable in ("TRITON_INTERPRET", "TORCHDYNAMO_DISABLE"):
        monkeypatch.setenv(variable, "0")  # so that what `activate` sets is undone
        monkeypatch.delenv(variable)
    return calls


@pytest.mark.parametrize("selected", [None, "some_other_platform"])
def test_the_platform_does_nothing_unless_it_is_named(monkeypatch, registered, selected):
    monkeypatch.delenv("SGLANG_PLATFORM", raising=False)
    if selected:
        monkeypatch.setenv("SGLANG_PLATFORM", selected)
    assert cpu_platform.activate() is None
    assert registered == []
    assert not {"TRITON_INTERPRET", "TORCHDYNAMO_DISABLE"} & set(os.environ)


def test_the_named_platform_hooks_and_interprets(monkeypatch, registered):
    monkeypatch.setenv("SGLANG_PLATFORM", "ddtree_cpu")
    platform_class = pkgutil.resolve_name(cpu_platform.activate())
    assert platform_class().is_out_of_tree()
    assert registered == ["hooks"]
    assert os.environ["TRITON_INTERPRET"] == os.environ["TORCHDYNAMO_DISABLE"] == "1"


def test_every_hook_stands_in_the_contract():
    in_contract = {attribute.path for attribute in CONTRACT if attribute.use is Use.HOOK}
    hooked = {target for target, _, _ in cpu_hooks.CPU_HOOKS if target.startswith("sglang.")}
    assert hooked <= in_contract


def test_new_slots_are_written_to_their_requests_rows_only():
    req_to_token = torch.zeros(4, 8, dtype=torch.int32)
    cpu_hooks.assign_req_to_token_pool(
        torch.tensor([2, 0]), req_to_token, torch.tensor([1, 5]), torch.tensor([4, 7]),
        torch.tensor([11, 12, 13, 21, 22]), batch_size=2,
    )  # fmt: skip
    expected = torch.zeros(4, 8, dtype=torch.int32)
    expected[2, 1:4] = torch.tensor([11, 12, 13], dtype=torch.int32)
    expected[0, 5:7] = torch.tensor([21, 22], dtype=torch.int32)
    assert torch.equal(req_to_token, expected)


def test_cache_locations_are_the_rows_next_slots_in_request_order():
    req_to_token = torch.arange(40, dtype=torch.int32).view(4, 10)
    locations = gather_cache_locs(
        req_pool_indices=torch.tensor([3, 1]), req_to_token=req_to_token,
        start_offset=torch.tensor([2, 6], dtype=torch.int32),
        end_offset=torch.tensor([5, 9], dtype=torch.int32),
        batch_size=2, draft_token_num=3, device="cpu",
    )  # fmt: skip
    assert locations.dtype == torch.int64
    assert locations.tolist() == [32, 33, 34, 16, 17, 18]


def test_the_last_slot_of_an_empty_prefix_is_minus_one():
    req_to_token = torch.arange(20, dtype=torch.int32).view(2, 10)
    last = cpu_hooks.get_last_loc(req_to_token, torch.tensor([1, 0]), torch.tensor([4, 0]))
    assert last.tolist() == [13, -1]


def test_kv_rows_that_overlap_their_target_are_read_before_they_are_written():
    pool = CpuMHATokenToKVPool.__new__(CpuMHATokenToKVPool)
    pool.k_buffer = [torch.arange(8.0).view(8, 1, 1)]
    pool.v_buffer = [torch.arange(8.0).view(8, 1, 1) * 10]
    pool._move_kv_cache_impl(torch.tensor([1, 2, 3]), torch.tensor([2, 3, 5]))
    assert pool.k_buffer[0].flatten().tolist() == [0, 2, 3, 5, 4, 5, 6, 7]
    assert pool.v_buffer[0].flatten().tolist() == [0, 20, 30, 50, 40, 50, 60, 70]


def test_seeded_noise_is_that_of_the_stock_gpu_kernel():
    seeds = torch.tensor([0, 1, -1, 2**63 - 1, 123456789123456789])
    positions = torch.tensor([0, 7, 2**31, 5, 99])
    columns = torch.arange(1500)
    stock = torch.empty((5, 1500), dtype=torch.uint32)
    murmur_hash32_kernel[(5, 2)](seeds.to(torch.uint64), positions, columns, stock, 5, 1500, BLOCK_SIZE=1024)
    assert torch.equal(cpu_hooks.murmur_hash32(seeds, positions, columns), stock.to(torch.int64))


def test_stock_record_stream_refuses_cpu_tensors_and_the_hook_does_not():
    tensor = torch.zeros(1)
    with pytest.raises((RuntimeError, NotImplementedError)):
        tensor.record_stream(torch.Stream(device="cpu"))
    cpu_hooks.record_stream(torch.Tensor.record_stream, tensor, None)


@pytest.mark.parametrize(("resolved", "kept"), [("intel_amx", None), ("triton", "triton")])
def test_only_the_amx_backend_is_taken_back(resolved, kept):
    arguments = types.SimpleNamespace(attention_backend=resolved)
    cpu_platform.DDTreeCpuPlatform().apply_server_args_defaults(arguments)
    assert arguments.attention_backend == kept


@pytest.mark.parametrize(
    ("latent", "hybrid", "sinks", "backend"),
    [
        (False, False, False, "torch_native"),
        (True, False, False, "triton"),
        (False, True, False, "triton"),
        (False, False, True, "triton"),
    ],
)
def test_a_model_gets_the_backend_that_can_serve_it(latent, hybrid, sinks, backend):
    config = types.SimpleNamespace(is_hybrid_swa=hybrid, has_attention_sinks=sinks)
    assert cpu_hooks.default_attention_backend(None, latent, config) == backend
