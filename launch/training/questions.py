"""Questions that the target makes up itself, to be answered like any other prompt.

An instruct model has read its users' turns too: given the chat template up to where a user's words begin, it
writes what a user might ask, on far more subjects than prompts made from parts reach.
"""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

from answers import Answer
from hf_target import HFTarget

HEAT = 0.9  # the temperature: at 1 some are no language, much below many are alike
MOST_TOKENS = 96
LEAST_TOKENS = 4


def ask(answer: Answer, at_once: int, target: HFTarget, count: int, rows: int) -> list[dict[str, str]]:
    """`count` tries in calls of `rows`, so many `at_once`: the different ones that came to their end."""
    opening, started = target.opening_ids(), time.time()
    if not opening or not count:
        return []
    sizes = [min(rows, count - begin) for begin in range(0, count, rows)]
    with ThreadPoolExecutor(at_once) as pool:
        calls = [pool.submit(answer, [opening] * size, [HEAT] * size, MOST_TOKENS) for size in sizes]
        made = [tokens for call in calls for tokens in call.result()]
    ended = [tokens[:-1] for tokens in made if tokens[-1] in target.end_ids and len(tokens) > LEAST_TOKENS]
    texts = (target.tokenizer.decode(tokens, skip_special_tokens=True).strip() for tokens in ended)
    questions = [{"kind": "question", "text": text} for text in dict.fromkeys(texts) if text]
    print(f"[own text] {len(questions):,} questions, {time.time() - started:.0f} s", flush=True)
    return questions
