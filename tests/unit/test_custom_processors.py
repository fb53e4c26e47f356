"""custom_processors.py with SGLang's own processors: a row is a request that has said its branch."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest
import torch
from random_trees import branch, random_tree
from sglang.srt.sampling.custom_logit_processor import (
    DeepseekOCRNoRepeatNGramLogitProcessor,
    DisallowedTokensLogitsProcessor,
)
from sglang.srt.sampling.sampling_batch_info import ProcessorEntry, SamplingBatchInfo

from sglang_ddtree_patch.sampling.custom_processors import CustomProcessors, RequestOnBranch

VOCABULARY = 10
PROMPT = [1, 2, 3, 4]
NO_REPEAT = {"ngram_size": 2, "window_size": 100}


@dataclass(eq=False)
class Request:
    custom_logit_processor: str | None
    output_ids: array = field(default_factory=lambda: array("q"))
    origin_input_ids: array = field(default_factory=lambda: array("q", PROMPT))
    rid: str = "a"


def batch_of(requests: list[Request], params: list[dict | None]) -> SimpleNamespace:
    """Request 0 has none, request 1 bans tokens, requests 2 and 3 ban what would repeat two tokens."""
    entries = {
        1: ProcessorEntry(DisallowedTokensLogitsProcessor(), [1], torch.tensor([1])),
        2: ProcessorEntry(DeepseekOCRNoRepeatNGramLogitProcessor(), [2, 3], torch.tensor([2, 3])),
    }
    info = SamplingBatchInfo(
        temperatures=torch.ones(4, 1), top_ps=torch.ones(4), top_ks=torch.ones(4), min_ps=torch.zeros(4),
        is_all_greedy=True, is_any_greedy=True, need_top_p_sampling=False, need_top_k_sampling=False,
        need_min_p_sampling=False, vocab_size=VOCABULARY, device="cpu",
        has_custom_logit_processor=True, custom_params=params, custom_logit_processor=entries,
    )  # fmt: skip
    return SimpleNamespace(reqs=requests, sampling_info=info)


@pytest.mark.parametrize("seen_by_the_scheduler", ["all", "all but the last round"])
@pytest.mark.parametrize("width", [1, 12, 33])
def test_every_row_is_processed_as_after_its_own_branch(width, seen_by_the_scheduler):
    said = [[5], [6, 7], [2, 3, 1, 2], [4, 4, 1]]
    requests = [Request(None), *(Request("x") for _ in range(3))]
    params = [{"__req__": 1}, {"token_ids": [0, 9]}]  # the first is a client's own
    params += [{**NO_REPEAT, "__req__": each} for each in requests[2:]]
    processors, batch = CustomProcessors(), batch_of(requests, params)
    # The last round committed two tokens of each but the first.
    padded = torch.tensor([[5, 0, 0], [6, 7, 8], [1, 2, 8], [4, 1, 8]])
    processors.record(batch, padded, torch.tensor([1, 2, 2, 2], dtype=torch.int32))
    for request, tokens in zip(requests, said, strict=True):
        request.output_ids.extend(tokens if seen_by_the_scheduler == "all" else tokens[:-2])
    roots = [tokens[-1] for tokens in said]
    tree = random_tree(roots, width, vocabulary=VOCABULARY, candidates=4, seed=width)
    logits = torch.randn(4 * width, VOCABULARY)
    expected = logits.clone()
    for row in range(width):
        expected[width + row, [0, 9]] = -torch.inf
        for index in (2, 3):
            one = expected[index * width + row][None]
            request = Request("x", output_ids=array("q", said[index] + branch(tree, index, row)))
            DeepseekOCRNoRepeatNGramLogitProcessor()(one, [{**NO_REPEAT, "__req__": request}])
    prefix_lens = torch.tensor([len(PROMPT) + len(tokens) - 1 for tokens in said])
    processors.apply(batch, logits, tree, prefix_lens)
    assert torch.equal(logits, expected)
    assert expected[2 * width :].isinf().any()


def test_a_batch_without_processors_is_left_alone():
    batch = SimpleNamespace(reqs=[], sampling_info=SimpleNamespace(has_custom_logit_processor=False))
    processors = CustomProcessors()
    processors.record(batch, None, None)
    processors.apply(batch, None, None, None)


def test_a_view_answers_as_its_request_but_for_what_it_has_said():
    request = Request("x", output_ids=array("q", [1]))
    view = RequestOnBranch(request, [1, 2])
    assert view.output_ids == array("q", [1, 2])
    assert view.rid == "a"
    assert view.origin_input_ids + view.output_ids == array("q", [*PROMPT, 1, 2])
    assert request.output_ids == array("q", [1])
