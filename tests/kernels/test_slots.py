"""kernels/slots.py: slots and positions behind each committed length, in plain PyTorch and as a kernel."""

import pytest
import torch

from sglang_ddtree_patch.kernels.slots import next_slots_torch
from sglang_ddtree_patch.kernels.slots_kernel import next_slots_triton

MASK_TOKEN = 99


def by_kernel(table, requests, lens, roots, block_ids, count):
    """The kernel's answer: compiled where there is a GPU, else interpreted; everything comes back."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    on_device = block_ids.to(device)
    arguments = (one.to(device) for one in (table, requests, lens, roots))
    slots, positions = next_slots_triton(*arguments, on_device, count)
    block_ids.copy_(on_device)
    return slots.cpu(), positions.cpu()


@pytest.mark.parametrize("look_up", [next_slots_torch, by_kernel], ids=["PyTorch", "kernel"])
@pytest.mark.parametrize("integers", [torch.int32, torch.int64])
@pytest.mark.parametrize(("draft", "count"), [(1, 1), (8, 8), (8, 17), (16, 64), (16, 100)])
def test_each_request_gets_the_slots_behind_its_length_and_its_own_root(look_up, integers, draft, count):
    table = torch.randint(0, 1 << 30, (9, 300), dtype=torch.int32)[:, :250]  # a row is wider than it looks
    requests = torch.tensor([3, 0, 8], dtype=integers)
    lens = torch.tensor([0, 150, 77], dtype=integers)
    roots = torch.tensor([5, 6, 7])
    block_ids = torch.full((4, draft), MASK_TOKEN)
    slots, positions = look_up(table, requests, lens, roots, block_ids[:3], count)
    for i, (row, length) in enumerate(zip(requests.tolist(), lens.tolist(), strict=True)):
        assert slots[i].tolist() == table[row, length : length + count].tolist()
        assert positions[i].tolist() == list(range(length, length + draft))
    # Masks stay, and so does the block of a request that is not in the batch.
    assert block_ids[:, 0].tolist() == [5, 6, 7, MASK_TOKEN]
    assert (block_ids[:, 1:] == MASK_TOKEN).all()
    assert slots.dtype == positions.dtype == torch.int64
    assert slots.is_contiguous()
    assert positions.is_contiguous()
