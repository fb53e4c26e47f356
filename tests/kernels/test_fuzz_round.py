"""Tree, masks, accept and commit together, fuzzed: one round must leave what decoding row by row would leave.

The target is a table: which token follows a path of tokens. Plain decoding asks it one token at a time; the
round builds a tree of what the drafter offers, asks the table once for every row, walks, and commits. The KV
of a row names the tokens it saw through its mask, so that a wrong parent, mask, walk or move shows.
"""

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sglang_ddtree_patch.kernels.accept.walk import accept_greedy_torch
from sglang_ddtree_patch.kernels.accept.walk_kernel import accept_greedy_triton
from sglang_ddtree_patch.kernels.commit import RowBuffers, commit_rows
from sglang_ddtree_patch.kernels.tree.build import TokenTree, build_token_tree_torch, unpack_masks
from sglang_ddtree_patch.kernels.tree.build_kernel import build_token_tree_triton

VOCABULARY = 5
ROOT = 3
BIG = 1_000_003  # a path of tokens as one number: the digits of a polynomial, modulo 2**31


@st.composite
def rounds(draw: st.DrawFn) -> dict:
    """A small round: drafts that guess well or badly, any page size, any order of pages."""
    depths, width = draw(st.integers(1, 5)), draw(st.integers(1, 14))
    candidates = draw(st.integers(1, VOCABULARY))
    rows = st.permutations(range(VOCABULARY)).map(lambda order: order[:candidates])
    score = st.sampled_from([0.0, -0.25, -0.5, -1.0, -4.0, -30.0, -float("inf")])
    scores = st.lists(score, min_size=candidates, max_size=candidates)
    return {
        "tokens": draw(st.lists(rows, min_size=depths, max_size=depths)),
        "scores": draw(st.lists(scores, min_size=depths, max_size=depths)),
        "width": width,
        "target": draw(st.integers(0, 2**20)),
        "page": draw(st.sampled_from([1, 2, 4, 16])),
        "prefix": draw(st.integers(0, 20)),
        "order": draw(st.randoms(use_true_random=False)),
    }


def target_says(seed: int, path: tuple[int, ...]) -> int:
    """The table: the token after a path, the root first."""
    return hash((seed, path)) % VOCABULARY


def decoded(seed: int, count: int) -> tuple[int, ...]:
    """What plain decoding says after the root, root included."""
    path = (ROOT,)
    while len(path) <= count:
        path += (target_says(seed, path),)
    return path


def seen_by(tree: TokenTree, row: int) -> tuple[int, ...]:
    """Tokens a row sees through its mask, in the order of their depth: what attention would give it."""
    rows = unpack_masks(tree.masks)[0, row].nonzero().flatten()
    assert tree.depths[0, rows].tolist() == list(range(len(rows)))
    return tuple(tree.tokens[0, rows].tolist())


def fingerprint(path: tuple[int, ...]) -> int:
    value = 0
    for token in path:
        value = (value * BIG + token + 1) % 2**31
    return value


def drafted(case: dict, build) -> TokenTree:
    """The tree of a case; possible candidates first, as a drafter gives them."""
    scores = torch.tensor(case["scores"])
    scores, order = scores.sort(dim=-1, descending=True, stable=True)
    tokens = torch.tensor(case["tokens"]).gather(1, order)
    return build(
        torch.tensor([ROOT]), tokens[None], scores[None], case["width"], torch.tensor([case["prefix"]])
    )


def check_round(case: dict, build, accept) -> None:
    tree = drafted(case, build)
    width, depths, prefix = case["width"], len(case["tokens"]), case["prefix"]
    count = int(tree.node_counts[0])
    paths = [seen_by(tree, row) for row in range(width)]
    assert paths[0] == (ROOT,)
    assert len(set(paths[:count])) == count
    predictions = torch.tensor([[target_says(case["target"], path) for path in paths]])

    path_limit = min(width, depths + 1)
    accepted = accept(tree.tokens, tree.parents, predictions, path_limit, torch.tensor([prefix]))
    length = int(accepted.commit_lengths[0])
    truth = decoded(case["target"], length)
    assert (ROOT, *accepted.tokens[0, :length].tolist()) == truth
    assert accepted.bonus_tokens.tolist() == [truth[-1]]
    assert accepted.new_lens.tolist() == [prefix + length]
    # It went on for as long as the tree held the truth.
    assert length == path_limit or truth not in paths[:count]

    page = case["page"]
    pages = list(range(1, -(-(prefix + width) // page) + 1))
    case["order"].shuffle(pages)
    slots = torch.tensor([page * p + i for p in pages for i in range(page)])[prefix : prefix + width]
    pool = torch.full(((len(pages) + 1) * page, 2), -1)
    pool[slots] = torch.tensor([[fingerprint(p), row] for row, p in enumerate(paths)])
    before = pool.clone()
    commit_rows(RowBuffers.of([pool]), slots[None].contiguous(), accepted.rows)
    assert pool[slots[:length], 0].tolist() == [fingerprint(truth[: n + 1]) for n in range(length)]
    kept = torch.ones(len(pool), dtype=torch.bool)
    kept[slots[:length]] = False
    assert torch.equal(pool[kept], before[kept])


@settings(max_examples=250, deadline=None, suppress_health_check=list(HealthCheck))
@given(rounds())
def test_a_round_leaves_what_plain_decoding_leaves(case):
    check_round(case, build_token_tree_torch, accept_greedy_torch)


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(rounds())
def test_a_round_of_the_kernels_leaves_it_too(case):
    check_round(case, build_token_tree_triton, accept_greedy_triton)
