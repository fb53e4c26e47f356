"""Tree build as one Triton launch: the same trees as `build.py`, row for row, one program a request.

The tree is grown best first, one row a step. Siblings come sorted, so a row needs to offer one child only:
its best candidate that is not in the tree yet. A step takes the best child on offer of all rows, and then
two offers change, the parent's (its next candidate) and the new row's (its first). What is taken never
beats what was taken before it, whichever way ties break, so rows come out in the order of the tree.

Offers are compared by what they cost, then by their parents' places:

    cost     minus the score: at least 0, and floats of one sign order like their bits, so 32-bit integers
             do. Summed one depth after another, as in the reference, so ties are the same ties.
    place    the parent's depth, then its position among the rows in depth-first order with siblings by
             rank. Among rows of one depth that is the lexicographic order of their ranks, and two offers
             never share a parent. A row that enters goes behind everything below its parent, so each row
             also keeps the position of the last row below it, and rows behind move on by one.

All state of a request is a few registers a row in one warp; nothing is sorted, and a step is three
reductions over the warp. Shapes alone decide the work: no host, no data-dependent launch.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sglang_ddtree_patch.kernels.tree.build import WORD_BITS, TokenTree, mask_words

WARP = 32
# The bits of an infinite float: no cost reaches it but an impossible candidate's.
IMPOSSIBLE = tl.constexpr(0x7F800000)
LAST = tl.constexpr(0x7FFFFFFF)  # sorts behind every place


@triton.jit
def _offer(log_probs, candidate, cost, exists):
    """Cost of a row's child on offer, as bits: infinite where it does not exist or is impossible."""
    log_prob = tl.load(log_probs + candidate, mask=exists, other=float("-inf")).to(tl.float32)
    # A candidate rounded above certainty counts as certain; neither branch holds of NaN.
    step = tl.where(log_prob <= 0, tl.abs(log_prob), tl.where(log_prob > 0, 0.0, float("inf")))
    return (cost + step).to(tl.int32, bitcast=True)


# Told that outputs are aligned, the compiler would lay rows out in pairs for wider stores, and carry the
# state of the loop twice, once for each layout.
POINTERS = (
    "root_tokens", "candidate_tokens", "log_probs", "prefix_lens",
    "tokens", "parents", "depths", "masks", "node_counts", "scores", "positions",
)  # fmt: skip
SIZES = ("block", "candidates", "width", "words")


@triton.jit(do_not_specialize=SIZES, do_not_specialize_on_alignment=POINTERS)
def _build_tree(
    root_tokens, candidate_tokens, log_probs, prefix_lens,
    tokens, parents, depths, masks, node_counts, scores, positions,
    block, candidates, width, words,
    ROW_BITS: tl.constexpr, DEPTH_LANES: tl.constexpr, WORD_BITS: tl.constexpr, WORD_LANES: tl.constexpr,
):  # fmt: skip
    """Program (request): the tree of one request. ``block`` is its number of drafted positions; the
    other shapes are those of `build_token_tree`."""
    ROWS: tl.constexpr = 1 << ROW_BITS
    LOW: tl.constexpr = ROWS - 1
    NEXT_POSITION: tl.constexpr = ROWS + 1  # moves first and last of a place on by one
    request = tl.program_id(0).to(tl.int64)
    log_probs += request * block * candidates
    candidate_tokens += request * block * candidates
    root_token = tl.load(root_tokens + request)
    if prefix_lens is not None:
        prefix_len = tl.load(prefix_lens + request).to(tl.int64)
    rows = tl.arange(0, ROWS)

    # No path goes past a depth whose best candidate is impossible. Looking at all depths in one go also
    # brings their candidates near before they are needed one by one.
    lanes = tl.arange(0, DEPTH_LANES)
    best_of_depth = tl.load(log_probs + lanes * candidates, mask=lanes < block, other=float("nan"))
    reach = tl.min(tl.where(best_of_depth > float("-inf"), DEPTH_LANES, lanes), 0)

    place = tl.zeros([ROWS], tl.int32)  # depth, position, position of the last row below: from the top bits
    cost = tl.zeros([ROWS], tl.float32)
    offered = tl.zeros([ROWS], tl.int32)  # candidate on offer: depth * candidates + rank
    offer = _offer(log_probs, offered, cost, (rows == 0) & (reach > 0))
    origin = tl.full([ROWS], -1, tl.int32)  # candidate that a row is, and its parent: from the top bits
    for row in range(1, width):
        best = tl.min(offer, 0)
        found = best < IMPOSSIBLE
        is_best = offer == best
        chosen = tl.min(tl.where(is_best, place, LAST), 0)
        chosen = tl.where(found, chosen, -1)
        is_parent = is_best & (place == chosen)
        is_new = (rows == row) & found

        taken = tl.max(tl.where(is_parent, (offered << ROW_BITS) | rows, 0), 0)
        origin = tl.where(is_new, taken, origin)

        child_depth = (chosen >> 2 * ROW_BITS) + 1
        parent_position = (chosen >> ROW_BITS) & LOW
        end = chosen & LOW
        position = (place >> ROW_BITS) & LOW
        above = (position <= parent_position) & ((place & LOW) >= parent_position)
        place += tl.where(position > end, NEXT_POSITION, tl.where(above, 1, 0))
        place = tl.where(is_new, (child_depth << 2 * ROW_BITS) + (end + 1) * NEXT_POSITION, place)

        cost = tl.where(is_new, best.to(tl.float32, bitcast=True), cost)
        offered = tl.where(is_new, child_depth * candidates, offered + is_parent.to(tl.int32))
        exists = (is_parent & (offered < child_depth * candidates)) | (is_new & (child_depth < reach))
        offer = tl.where(is_parent | is_new, _offer(log_probs, offered, cost, exists), offer)

    is_node = origin >= 0
    token = tl.load(candidate_tokens + (origin >> ROW_BITS), mask=is_node, other=0)
    parent = tl.where(is_node, origin & LOW, -1)
    depth = tl.where(is_node, place >> 2 * ROW_BITS, 0)
    inside = rows < width
    out = request * width + rows
    tl.store(node_counts + request, tl.sum(is_node.to(tl.int32), 0).to(tl.int64) + 1)
    tl.store(tokens + out, tl.where(is_node, token, root_token), mask=inside)
    tl.store(parents + out, parent.to(tl.int64), mask=inside)
    tl.store(depths + out, depth.to(tl.int64), mask=inside)
    tl.store(scores + out, tl.where(is_node | (rows == 0), -cost, float("-inf")), mask=inside)
    if prefix_lens is not None:
        tl.store(positions + out, prefix_len + depth, mask=inside)

    # A row sees itself and what its parent sees. Level by level through memory, where a parent's mask, of
    # the level before, is another lane's.
    word = tl.arange(0, WORD_LANES)[None, :]
    bit = tl.full([ROWS], 1, tl.int64) << (rows % WORD_BITS)
    itself = tl.where((rows // WORD_BITS)[:, None] == word, bit[:, None], 0)
    masks += request * width * words
    mine = masks + rows[:, None] * words + word
    is_word = word < words
    tl.store(mine, itself, mask=inside[:, None] & is_word)
    for level in range(1, tl.max(depth, 0) + 1):
        tl.debug_barrier()
        here = (depth == level)[:, None] & is_word
        seen = tl.load(masks + parent[:, None] * words + word, mask=here, other=0)
        tl.store(mine, itself | seen, mask=here)


def build_token_tree_triton(
    root_tokens: torch.Tensor,
    candidate_tokens: torch.Tensor,
    log_probs: torch.Tensor,
    width: int,
    prefix_lens: torch.Tensor | None = None,
) -> TokenTree:
    """`build_token_tree` by the kernel: arguments and result are described there.

    Raises:
        ValueError: a tree too large for the kernel's 32-bit places, far beyond 256 rows of 64 positions.
    """
    batch, depths, candidates = candidate_tokens.shape
    rows, words = max(triton.next_power_of_2(width), WARP), mask_words(width)
    if max((depths + 1) * rows * rows, (depths * candidates + 1) * rows) > 1 << 31:
        raise ValueError(
            f"a tree of {width} rows over {depths} positions of {candidates} candidates is too large: "
            "rows squared times positions must stay below 2**31"
        )
    like = {"dtype": torch.int64, "device": root_tokens.device}
    tree_depths = torch.empty((batch, width), **like)
    tree = TokenTree(
        tokens=torch.empty((batch, width), **like),
        parents=torch.empty((batch, width), **like),
        depths=tree_depths,
        masks=torch.empty((batch, width, words), **like),
        node_counts=torch.empty(batch, **like),
        scores=torch.empty((batch, width), dtype=torch.float32, device=root_tokens.device),
        positions=tree_depths if prefix_lens is None else torch.empty((batch, width), **like),
    )
    _build_tree[(batch,)](
        root_tokens.contiguous(), candidate_tokens.contiguous(), log_probs.contiguous(),
        None if prefix_lens is None else prefix_lens.contiguous(),
        tree.tokens, tree.parents, tree.depths, tree.masks, tree.node_counts, tree.scores,
        None if prefix_lens is None else tree.positions,
        depths, candidates, width, words,
        ROW_BITS=rows.bit_length() - 1, DEPTH_LANES=max(triton.next_power_of_2(depths + 1), WARP),
        WORD_BITS=WORD_BITS, WORD_LANES=mask_words(rows), num_warps=1,
    )  # fmt: skip
    return tree
