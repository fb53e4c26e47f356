"""Tree build: the best token tree under a node budget, from per-position candidates.

A DFlash drafter scores each position of its block on its own, so a path of the tree is a tuple of
candidate ranks, one a depth, and its score is the sum of their log-probabilities. DDTree (Ringel and
Romano, arXiv 2604.12989) keeps the ``width - 1`` best paths of any depth; they are closed under
parents because a child never scores above its parent.

The paper pops them from a heap. Here each depth keeps its own best ``width - 1`` prefixes and the best
of all depths are then picked at once. That is the same set: a prefix outside the best ``width - 1`` of
its depth has that many better ones before it, and so do all its descendants. It needs no host, no heap
and no data-dependent shape.

Ties break by score (higher first), then depth (shallower first), then ranks (lexicographically
smaller first), on every device and every rank of a tensor-parallel group alike.

On NVIDIA GPUs `build_token_tree` is one launch of `kernels/tree/build_kernel.py`; the code here is what that
is tested against, and what runs everywhere else.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sglang_ddtree_patch.kernels.device import has_kernels

WORD_BITS = 64


def mask_words(width: int) -> int:
    """How many int64 words an ancestor bitmask over ``width`` rows takes."""
    return -(-width // WORD_BITS)


@dataclass(frozen=True)
class TokenTree:
    """The verify block of a batch: ``width`` rows a request, row 0 the root, parents before children.

    A request with fewer nodes than rows is padded at the end. A padding row carries the root's token
    at the root's depth, sees itself alone and has no parent, so no walk reaches it.
    """

    tokens: torch.Tensor  # [batch, width] int64
    parents: torch.Tensor  # [batch, width] int64: row of the parent; -1 for the root and for padding
    depths: torch.Tensor  # [batch, width] int64: edges from the root
    masks: torch.Tensor  # [batch, width, words] int64: bit j of word j // 64 says "sees row j"
    node_counts: torch.Tensor  # [batch] int64: rows that are nodes, root included
    # [batch, width] float32: log-prob of the row's path, not increasing along the rows; -inf for padding
    scores: torch.Tensor
    # [batch, width] int64: rotary positions, prefix length + depth; the depths where no lengths were given
    positions: torch.Tensor

    @property
    def width(self) -> int:
        return self.tokens.shape[1]

    def first(self, batch: int) -> TokenTree:
        """The trees of the first ``batch`` requests, in the same memory."""
        return TokenTree(**{name: it[:batch] for name, it in vars(self).items()})

    def narrowed(self, width: int) -> TokenTree:
        """The tree of the best ``width`` rows, which are the first ones: rows stand best first."""
        if width == self.width:
            return self
        rows = slice(0, width)
        return TokenTree(
            tokens=self.tokens[:, rows].contiguous(),
            parents=self.parents[:, rows].contiguous(),
            depths=self.depths[:, rows].contiguous(),
            masks=self.masks[:, rows, : mask_words(width)].contiguous(),
            node_counts=self.node_counts.clamp(max=width),
            scores=self.scores[:, rows],
            positions=self.positions[:, rows].contiguous(),
        )


def expected_accept_lengths(tree: TokenTree, widths: torch.Tensor) -> torch.Tensor:
    """The accept length to expect of each width, if the drafter is right about itself: [batch, widths].

    A row is accepted with all of its path, so the sum of the first rows' path probabilities is how many of
    them to expect.

    Args:
        tree: of at least the largest width.
        widths: [widths] int64, each at least 1.

    Returns:
        float32, without the bonus token.
    """
    accepted = tree.scores.exp().cumsum(1) - 1  # the root is no draft
    return accepted.index_select(1, widths - 1)


def root_only_tree(root_tokens: torch.Tensor, width: int, prefix_lens: torch.Tensor | None) -> TokenTree:
    """A tree without candidates: the root and ``width - 1`` rows of padding."""
    batch, device = root_tokens.shape[0], root_tokens.device
    parents = torch.full((batch, width), -1, dtype=torch.int64, device=device)
    depths = torch.zeros((batch, width), dtype=torch.int64, device=device)
    scores = torch.full((batch, width), -torch.inf, device=device)
    scores[:, 0] = 0.0
    return TokenTree(
        tokens=root_tokens[:, None].repeat(1, width),
        parents=parents,
        depths=depths,
        masks=ancestor_masks(parents, max_depth=0),
        node_counts=torch.ones(batch, dtype=torch.int64, device=device),
        scores=scores,
        positions=depths if prefix_lens is None else prefix_lens.long()[:, None].repeat(1, width),
    )


def build_token_tree(
    root_tokens: torch.Tensor,
    candidate_tokens: torch.Tensor,
    log_probs: torch.Tensor,
    width: int,
    prefix_lens: torch.Tensor | None = None,
) -> TokenTree:
    """Build the ``width``-row tree of every request.

    Args:
        root_tokens: [batch] int64, the last committed token of each request.
        candidate_tokens: [batch, depths, candidates] int64, best first at each depth.
        log_probs: [batch, depths, candidates] floating point, at most 0 and not increasing along
            candidates. A candidate of ``-inf`` or NaN never enters the tree; such candidates come last.
        width: rows of the block, root included.
        prefix_lens: [batch] integers, committed lengths, which the rows' positions lie behind.

    Returns:
        TokenTree on the device of ``root_tokens``.
    """
    if has_kernels(root_tokens.device):
        from sglang_ddtree_patch.kernels.tree.build_kernel import build_token_tree_triton

        return build_token_tree_triton(root_tokens, candidate_tokens, log_probs, width, prefix_lens)
    return build_token_tree_torch(root_tokens, candidate_tokens, log_probs, width, prefix_lens)


def build_token_tree_torch(
    root_tokens: torch.Tensor,
    candidate_tokens: torch.Tensor,
    log_probs: torch.Tensor,
    width: int,
    prefix_lens: torch.Tensor | None = None,
) -> TokenTree:
    """`build_token_tree` in plain PyTorch, on any device."""
    batch, depths, candidates = candidate_tokens.shape
    device = root_tokens.device
    budget = width - 1
    scores, tokens, parents, node_depths = [], [], [], []
    # The frontier: the kept prefixes of the last depth, in lexicographic order of their ranks.
    frontier_scores = torch.zeros((batch, 1), dtype=torch.float32, device=device)
    frontier_ids = torch.full((batch, 1), -1, dtype=torch.int64, device=device)
    offset = 0
    for depth in range(depths if budget else 0):
        step = log_probs[:, depth].float()
        step = torch.where(step.isnan(), -torch.inf, step).clamp(max=0.0)
        children = (frontier_scores[:, :, None] + step[:, None, :]).flatten(1)
        kept = min(budget, children.shape[1])
        # A stable sort keeps equal scores in lexicographic order, which is their order here; sorting
        # the survivors' positions puts the new frontier back into it.
        chosen = torch.sort(children, dim=1, descending=True, stable=True).indices[:, :kept].sort(1).values
        frontier_scores = children.gather(1, chosen)
        ranks = chosen % candidates
        scores.append(frontier_scores)
        tokens.append(candidate_tokens[:, depth].gather(1, ranks))
        parents.append(frontier_ids.gather(1, chosen // candidates))
        node_depths.append(torch.full((batch, kept), depth + 1, dtype=torch.int64, device=device))
        frontier_ids = (offset + torch.arange(kept, device=device)).expand(batch, kept)
        offset += kept
    if offset == 0:
        return root_only_tree(root_tokens, width, prefix_lens)
    prefixes = _Prefixes(
        scores=torch.cat(scores, 1),
        tokens=torch.cat(tokens, 1),
        parents=torch.cat(parents, 1),
        depths=torch.cat(node_depths, 1),
    )
    return _best_prefixes(prefixes, root_tokens, width, min(depths, budget), prefix_lens)


@dataclass(frozen=True)
class _Prefixes:
    """The kept prefixes of all depths, shallow first: every field is [batch, prefixes]."""

    scores: torch.Tensor  # float32
    tokens: torch.Tensor  # int64
    parents: torch.Tensor  # int64: index of the parent prefix, -1 for a child of the root
    depths: torch.Tensor  # int64


def _best_prefixes(
    prefixes: _Prefixes,
    root_tokens: torch.Tensor,
    width: int,
    max_depth: int,
    prefix_lens: torch.Tensor | None,
) -> TokenTree:
    """The best ``width - 1`` prefixes as rows of a block, behind the root."""
    batch, total = prefixes.scores.shape
    device = prefixes.scores.device
    count = min(width - 1, total)
    best = torch.sort(prefixes.scores, dim=1, descending=True, stable=True).indices[:, :count]
    is_node = prefixes.scores.gather(1, best) > -torch.inf

    row_of = torch.zeros((batch, total), dtype=torch.int64, device=device)
    row_of.scatter_(1, best, torch.arange(1, count + 1, device=device).expand(batch, count))
    parent_prefixes = prefixes.parents.gather(1, best)
    parent_rows = torch.where(parent_prefixes < 0, 0, row_of.gather(1, parent_prefixes.clamp(min=0)))

    tokens = root_tokens[:, None].repeat(1, width)
    parents = torch.full((batch, width), -1, dtype=torch.int64, device=device)
    depths = torch.zeros((batch, width), dtype=torch.int64, device=device)
    scores = torch.full((batch, width), -torch.inf, device=device)
    scores[:, 0] = 0.0
    nodes = slice(1, count + 1)
    tokens[:, nodes] = torch.where(is_node, prefixes.tokens.gather(1, best), tokens[:, nodes])
    parents[:, nodes] = torch.where(is_node, parent_rows, -1)
    depths[:, nodes] = torch.where(is_node, prefixes.depths.gather(1, best), 0)
    scores[:, nodes] = prefixes.scores.gather(1, best)
    return TokenTree(
        tokens=tokens,
        parents=parents,
        depths=depths,
        masks=ancestor_masks(parents, max_depth),
        node_counts=is_node.sum(1) + 1,
        scores=scores,
        positions=depths if prefix_lens is None else prefix_lens.long()[:, None] + depths,
    )


def ancestor_masks(parents: torch.Tensor, max_depth: int) -> torch.Tensor:
    """Bitmask of every row's ancestors and itself: [batch, width, words] int64.

    Args:
        parents: [batch, width] int64, -1 where a row has no parent.
        max_depth: no row is deeper than this.
    """
    batch, width = parents.shape
    words = mask_words(width)
    rows = torch.arange(width, device=parents.device)
    own = torch.zeros((width, words), dtype=torch.int64, device=parents.device)
    own[rows, rows // WORD_BITS] = torch.ones_like(rows) << (rows % WORD_BITS)
    has_parent = (parents >= 0)[:, :, None]
    parent_index = parents.clamp(min=0)[:, :, None].expand(batch, width, words)
    masks = own.expand(batch, width, words)
    for _ in range(max_depth):
        masks = own | torch.where(has_parent, masks.gather(1, parent_index), 0)
    return masks.contiguous()


def chain_masks(batch: int, width: int, device: torch.device) -> torch.Tensor:
    """Masks of a chain, where every row sees itself and all rows before: [batch, width, words] int64."""
    parents = torch.arange(-1, width - 1, device=device)
    return ancestor_masks(parents[None], max_depth=width - 1).repeat(batch, 1, 1)


def unpack_masks(masks: torch.Tensor) -> torch.Tensor:
    """[..., width, words] int64 bitmasks as [..., width, width] bool: row i sees row j."""
    width = masks.shape[-2]
    columns = torch.arange(width, device=masks.device)
    return (masks[..., columns // WORD_BITS] >> (columns % WORD_BITS) & 1).bool()
