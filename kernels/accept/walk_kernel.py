"""Accept as one Triton launch: the same walks as `kernels/accept/walk.py`, one program a request.

Which rows carry what the target chose after their parent does not depend on the walk, so all rows look that
up at once, and the others are taken out. What is left of a walk step is one reduction over the warp: the
first row below the current one.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sglang_ddtree_patch.kernels.accept.walk import AcceptedPath

WARP = 32


POINTERS = (
    "tree_tokens", "parents", "predictions", "prefix_lens",
    "path_rows", "block_rows", "path_tokens", "commit_lengths", "bonus_tokens", "new_lens",
)  # fmt: skip


@triton.jit(do_not_specialize=["width", "path"], do_not_specialize_on_alignment=POINTERS)
def _walk(
    tree_tokens, parents, predictions, prefix_lens,
    path_rows, block_rows, path_tokens, commit_lengths, bonus_tokens, new_lens,
    width, path, ROWS: tl.constexpr, PATH_LANES: tl.constexpr,
):  # fmt: skip
    """Program (request): the walk of one request. Shapes as in `accept_greedy`."""
    request = tl.program_id(0).to(tl.int64)
    tree_tokens += request * width
    predictions += request * width
    if prefix_lens is not None:
        prefix_len = tl.load(prefix_lens + request).to(tl.int64)
    rows = tl.arange(0, ROWS)
    inside = rows < width
    token = tl.load(tree_tokens + rows, mask=inside, other=0)
    parent = tl.load(parents + request * width + rows, mask=inside, other=-1).to(tl.int32)
    wanted = tl.load(predictions + parent, mask=parent >= 0, other=0)
    parent = tl.where(token == wanted, parent, -1)

    offsets = tl.arange(0, PATH_LANES)
    walked = offsets
    current = 0
    last = 0
    length = 1
    for offset in range(1, path):
        # Past the end of the walk the current row is ROWS, which is no row's parent.
        current = tl.min(tl.where(parent == current, rows, ROWS), 0)
        goes_on = current < ROWS
        walked = tl.where((offsets == offset) & goes_on, current, walked)
        last = tl.where(goes_on, current, last)
        length += goes_on.to(tl.int32)

    in_path = offsets < path
    path_token = tl.load(predictions + walked, mask=in_path)
    bonus_token = tl.load(predictions + last)
    out = request * path + offsets
    tl.store(path_rows + out, walked.to(tl.int64), mask=in_path)
    tl.store(block_rows + out, request * width + walked, mask=in_path)
    tl.store(path_tokens + out, path_token, mask=in_path)
    tl.store(bonus_tokens + request, bonus_token)
    tl.store(commit_lengths + request, length)
    if prefix_lens is not None:
        tl.store(new_lens + request, prefix_len + length)


def accept_greedy_triton(
    tree_tokens: torch.Tensor,
    parents: torch.Tensor,
    predictions: torch.Tensor,
    path: int,
    prefix_lens: torch.Tensor | None = None,
) -> AcceptedPath:
    """`accept_greedy` by the kernel: arguments and result are described there."""
    batch, width = tree_tokens.shape
    like = {"dtype": torch.int64, "device": tree_tokens.device}
    accepted = AcceptedPath(
        rows=torch.empty((batch, path), **like),
        block_rows=torch.empty((batch, path), **like),
        tokens=torch.empty((batch, path), **like),
        commit_lengths=torch.empty(batch, dtype=torch.int32, device=tree_tokens.device),
        bonus_tokens=torch.empty(batch, **like),
        new_lens=None if prefix_lens is None else torch.empty(batch, **like),
    )
    _walk[(batch,)](
        tree_tokens.contiguous(), parents.contiguous(), predictions.contiguous(), prefix_lens,
        accepted.rows, accepted.block_rows, accepted.tokens, accepted.commit_lengths, accepted.bonus_tokens,
        accepted.new_lens,
        width, path, ROWS=max(triton.next_power_of_2(width), WARP),
        PATH_LANES=max(triton.next_power_of_2(path), WARP), num_warps=1,
    )  # fmt: skip
    return accepted
