"""The committed drafters really draft: trees are accepted, and accepted further than chains."""

from __future__ import annotations

import json
from pathlib import Path

from serving import ENVIRONMENT, Answer, Request, ask_all, ddtree_flags
from tokenizers import Tokenizer

from sglang_ddtree_patch import model_catalog
from sglang_ddtree_patch.launch.server_process import ServerProcess
from sglang_ddtree_patch.launch.server_template import ServerTemplate

PROMPTS = Path(__file__).parents[2] / "launch" / "training" / "held_out_prompts.json"
MODEL = "tiny-gqa"


def test_trees_are_accepted_further_than_chains_on_held_out_prompts(template: ServerTemplate) -> None:
    requests = held_out_requests(count=12)
    lengths, texts = [], []
    # One candidate a position leaves the drafter's best path alone: a chain of its block of 8.
    for width, candidates in ((32, 8), (8, 1)):
        environment = {**ENVIRONMENT, "SGLANG_DDTREE_TOPK": str(candidates)}
        arguments = ddtree_flags(MODEL, 16, width)
        with ServerProcess(arguments, environment=environment, launcher=template.launch, grace=0) as server:
            answers = ask_all(server, requests)
        lengths.append(mean_accept_length(answers))
        texts.append({name: answer.tokens for name, answer in answers.items()})
    assert texts[0] == texts[1]
    assert lengths[0] >= 2.5, lengths
    assert lengths[0] >= 1.2 * lengths[1], lengths


def held_out_requests(count: int) -> list[Request]:
    """Every other kind of prompt in turn, from files that neither model was trained on."""
    tokenizer = Tokenizer.from_file(str(model_catalog.path(MODEL) / "target" / "tokenizer.json"))
    prompts = json.loads(PROMPTS.read_text())
    step = len(prompts) // count
    return [
        Request(f"prompt {index}", tuple(tokenizer.encode(prompt["text"]).ids), 64, {"ignore_eos": True})
        for index, prompt in enumerate(prompts[::step][:count])
    ]


def mean_accept_length(answers: dict[str, Answer]) -> float:
    rounds = sum(answer.meta["spec_verify_ct"] for answer in answers.values())
    return sum(answer.meta["spec_num_correct_drafts"] for answer in answers.values()) / rounds
