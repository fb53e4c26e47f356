"""grammar_tree.py with xgrammar itself: every row allows what the grammar allows after its branch."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
import xgrammar
from random_trees import branch, random_tree
from sglang.srt.constrained.xgrammar_backend import XGrammarGrammar

from sglang_ddtree_patch.kernels.tree.build import TokenTree
from sglang_ddtree_patch.sampling.grammar_tree import GrammarOnTree, child_links

TOKENS = ["<end>", "a", "b", "ab", "ba", "c", "0", "1", "{", "}"]
END = 0
PATTERNS = {"regex": "(ab|ba|c)*[01]", "nested": "a(b(a(b|c)|c)|c)"}


@pytest.fixture(scope="module", params=PATTERNS)
def compiled(request):
    info = xgrammar.TokenizerInfo(TOKENS, stop_token_ids=[END])
    return xgrammar.GrammarCompiler(info).compile_regex(PATTERNS[request.param])


def automaton(compiled, said: list[int]) -> XGrammarGrammar:
    """A request's grammar as SGLang keeps it, after the tokens said."""
    matcher = xgrammar.GrammarMatcher(compiled, max_rollback_tokens=200)
    grammar = XGrammarGrammar(matcher, len(TOKENS), compiled, None)
    for token in said:
        grammar.accept_token(token)
    return grammar


def allowed(grammar: XGrammarGrammar) -> set[int]:
    bitmask = grammar.allocate_vocab_mask(len(TOKENS), 1, "cpu")
    if not grammar.is_terminated():
        grammar.fill_vocab_mask(bitmask, 0)
    return {token for token in range(len(TOKENS)) if int(bitmask[0, 0]) >> token & 1}


@dataclass
class Request:
    grammar: XGrammarGrammar | None


def some_tree(roots: list[int], width: int, seed: int) -> TokenTree:
    return random_tree(roots, width, vocabulary=len(TOKENS), candidates=5, seed=seed)


@pytest.mark.parametrize("width", [1, 8, 33, 70])
@pytest.mark.parametrize("seed", range(3))
def test_every_row_the_walk_can_reach_allows_what_the_grammar_allows_there(compiled, width, seed):
    # What the requests have said: nothing but the root, or more; the second has no grammar.
    said = [[1], [], [1, 2]]
    requests = [Request(automaton(compiled, said[0])), Request(None), Request(automaton(compiled, said[2]))]
    tree = some_tree([1, 5, 2], width, seed)
    info = SimpleNamespace(vocab_size=len(TOKENS), grammar_mask="of the prefill")
    batch = SimpleNamespace(reqs=requests, sampling_info=info, has_grammar=True, device="cpu")
    mask = GrammarOnTree.of(batch, tree).mask(batch, barrier=None)
    logits = torch.zeros(3 * width, len(TOKENS))
    mask.apply(logits)
    rows = [set(row.isfinite().nonzero().flatten().tolist()) for row in logits]
    reached = 0
    for index, row in ((i, r) for i in (0, 2) for r in range(width)):
        grammar, legal = automaton(compiled, said[index]), True
        for token in branch(tree, index, row):
            legal = legal and token in allowed(grammar) and not grammar.is_terminated()
            if legal:
                grammar.accept_token(token)
        if legal and (row == 0 or tree.parents[index, row] >= 0):
            reached += 1
            assert rows[index * width + row] == allowed(grammar), (index, row)
    assert reached > (2 if width >= 33 else 1)
    assert all(row == set(range(len(TOKENS))) for row in rows[width : 2 * width])
    # The automata stand where they stood.
    for index in (0, 2):
        assert allowed(requests[index].grammar) == allowed(automaton(compiled, said[index]))


def test_the_barrier_runs_before_the_automata_are_read(compiled):
    request = Request(automaton(compiled, []))
    batch = SimpleNamespace(
        reqs=[request], sampling_info=SimpleNamespace(vocab_size=len(TOKENS), grammar_mask=None),
        has_grammar=True, device="cpu",
    )  # fmt: skip
    tree = some_tree([1], 8, seed=0)
    mask = GrammarOnTree.of(batch, tree).mask(batch, barrier=lambda: request.grammar.accept_token(1))
    logits = torch.zeros(8, len(TOKENS))
    mask.apply(logits)
    assert set(logits[0].isfinite().nonzero().flatten().tolist()) == allowed(automaton(compiled, [1]))


def test_a_batch_without_grammars_copies_nothing():
    assert GrammarOnTree.of(SimpleNamespace(has_grammar=False), some_tree([1], 8, seed=0)) is None


@pytest.mark.parametrize("width", [1, 2, 16, 70])
def test_the_links_are_those_of_the_parents(width):
    tree = some_tree([1, 2, 3, 4], width, seed=width)
    first_child, next_sibling = child_links(tree.parents)
    for request in range(4):
        parents = tree.parents[request].tolist()
        for row in range(width):
            children = [other for other in range(width) if parents[other] == row]
            later = [other for other in range(row + 1, width) if parents[other] == parents[row] >= 0]
            assert first_child[request, row] == (children[0] if children else -1)
            assert next_sibling[request, row] == (later[0] if later else -1)
