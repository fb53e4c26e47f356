"""Trees of a random drafter, and what their branches say."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sglang_ddtree_patch.kernels.tree.build import TokenTree, build_token_tree


def random_tree(
    roots: Sequence[int], width: int, *, vocabulary: int, candidates: int, seed: int, depths: int = 4
) -> TokenTree:
    """One tree a root, of the candidates that come first in a random order of the vocabulary."""
    generator = torch.Generator().manual_seed(seed)
    shape = (len(roots), depths)
    tokens = torch.rand(*shape, vocabulary, generator=generator).argsort(-1)[:, :, :candidates]
    scores = torch.randn(*shape, candidates, generator=generator).log_softmax(-1)
    return build_token_tree(torch.tensor(roots), tokens, scores.sort(-1, descending=True).values, width)


def branch(tree: TokenTree, request: int, row: int) -> list[int]:
    """The tokens of a row's branch behind the root, by walking up."""
    found = []
    while row > 0:
        found.append(int(tree.tokens[request, row]))
        row = int(tree.parents[request, row])
    return found[::-1]
