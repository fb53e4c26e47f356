"""Questions that the target makes up itself, to be answered like any other prompt.

An instruct model has read its users' turns too: given the chat template up to where a user's words begin, it
writes what a user might ask, on far more subjects than prompts made from parts reach. Some tries are given
the first words, so that code, arithmetic and texts to summarise come up as often as they are judged.
"""

from __future__ import annotations

import json
import math
import time
from pathlib import Path

from answers import Answer, callers
from hf_target import HFTarget

HEAT = 0.9  # the temperature: at 1 some are no language, much below many are alike
MOST_TOKENS = 192
LEAST_TOKENS = 4
STARTS: list[str] = json.loads((Path(__file__).parent / "parts_of_prompts.json").read_text())["starts"]


def ask(
    answer: Answer, at_once: int, target: HFTarget, count: int, rows: int, until: float = math.inf
) -> list[dict[str, str]]:
    """`count` tries in calls of `rows`, so many `at_once`: the different ones that came to their end.

    Past `until` (time.time()) no call begins.
    """
    opening, started = target.opening_ids(), time.time()
    if not opening or not count:
        return []
    firsts = target.tokenizer(list(STARTS), add_special_tokens=False)["input_ids"]
    tries = [opening + firsts[index % len(firsts)] for index in range(count)]
    groups = [tries[begin : begin + rows] for begin in range(0, count, rows)]

    def try_all(group: list[list[int]]) -> list[list[int]]:
        return answer(group, [HEAT] * len(group), MOST_TOKENS) if time.time() < until else []

    with callers(at_once) as pool:
        made = [
            pair
            for group, said in zip(groups, pool.map(try_all, groups), strict=True)
            for pair in zip(group, said, strict=False)
        ]
    ended = [
        first[len(opening) :] + tokens[:-1]
        for first, tokens in made
        if tokens[-1] in target.end_ids and len(tokens) > LEAST_TOKENS
    ]
    texts = (text.strip() for text in target.tokenizer.batch_decode(ended, skip_special_tokens=True))
    questions = [{"kind": "question", "text": text} for text in dict.fromkeys(texts) if text]
    print(f"[own text] {len(questions):,} questions, {time.time() - started:.0f} s", flush=True)
    return questions
