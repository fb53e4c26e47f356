"""The mix of the GPU soak: a slice is the same thousand shapes of requests every time, about other text.

A shape says how long prompt and answer are, what is asked and how the client behaves; text, seeds and shared
prefixes come with the slice. So slices cost the same and can be timed against each other.

What is judged: greedy requests and those that draw by a seed at a temperature, of which stock's answer is
known up to rounding. What draws without a seed, or through top-k, top-p or min-p, where rounding moves a
boundary, is load.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

EOS = 2
LONGEST_PROMPT, LONGEST_ANSWER = 2000, 160
PREFIXES = 8  # beginnings that the prompts of a slice share

KINDS: dict[str, float] = {  # and their weights
    "greedy": 30, "streamed": 10, "log-probs": 5, "penalties": 9, "min tokens": 4, "bias": 4, "stops": 8,
    "grammar": 6, "twice": 2, "seeded": 9, "hang-up": 3, "abort": 3, "sampled": 7,
}  # fmt: skip
NOT_JUDGED = frozenset({"sampled"})
# One kind of penalty a request: stock's synchronous scheduler adds and scales in no definite order.
PENALTIES: list[dict[str, Any]] = [
    {"frequency_penalty": 0.4}, {"presence_penalty": 0.7}, {"repetition_penalty": 1.2},
    {"repetition_penalty": 0.9}, {"frequency_penalty": -0.3},
]  # fmt: skip
STOPS: list[dict[str, Any]] = [
    {"stop": "\n"}, {"stop": ["):", " ="]}, {"stop": "("}, {"stop_token_ids": [40, 300]},
    {"stop_regex": "self\\.[a-z]"}, {"stop": "if"},
]  # fmt: skip
SAMPLINGS: list[dict[str, Any]] = [
    {"temperature": 1.0}, {"temperature": 0.8, "top_p": 0.9}, {"temperature": 1.2, "top_k": 20},
    {"temperature": 0.7, "min_p": 0.05}, {"temperature": 0.9, "top_p": 0.95, "sampling_seed": 5},
]  # fmt: skip
GRAMMARS: list[dict[str, Any]] = [
    {"regex": "[a-z ]{5,40}"},
    {"regex": "(self\\.[a-z]{1,6} = [0-9]{1,3}\n){1,4}"},
    {"json_schema": json.dumps({
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 8}, "count": {"type": "integer"}},
        "required": ["name", "count"],
    })},
]  # fmt: skip


@dataclass(frozen=True)
class Shape:
    """What every slice asks once."""

    kind: str
    prompt: int  # tokens
    shared: int  # of them, the beginning that others of the slice have too
    prefix: int  # which beginning
    sampling: Mapping[str, Any]
    extra: Mapping[str, Any] = field(default_factory=dict)
    is_streamed: bool = False
    leaves_after: int | None = None  # events of the stream after which the client is gone
    aborted_after: float | None = None  # seconds after which it asks for the abort


@dataclass(frozen=True)
class SoakRequest:
    """One request of a slice."""

    name: str
    kind: str
    payload: Mapping[str, Any]
    is_streamed: bool = False
    leaves_after: int | None = None
    aborted_after: float | None = None

    @property
    def is_judged(self) -> bool:
        return self.kind not in NOT_JUDGED

    @property
    def is_given_up(self) -> bool:
        return self.leaves_after is not None or self.aborted_after is not None

    @property
    def prompt(self) -> list[int]:
        return self.payload["input_ids"]

    @property
    def sampling(self) -> Mapping[str, Any]:
        return self.payload["sampling_params"]

    @property
    def is_seeded(self) -> bool:
        return "sampling_seed" in self.sampling

    @property
    def is_plain(self) -> bool:
        """Whether what it chooses from are the target's own logits."""
        return self.kind in ("greedy", "streamed", "log-probs", "stops", "twice", "hang-up", "abort")


def shapes(
    count: int, longest_prompt: int = LONGEST_PROMPT, longest_answer: int = LONGEST_ANSWER
) -> list[Shape]:
    """The slice's requests, in the order in which they are sent."""
    draw = random.Random("soak")
    # Every kind once, however few they are.
    chosen = [*KINDS, *draw.choices(list(KINDS), list(KINDS.values()), k=max(count - len(KINDS), 0))]
    draw.shuffle(chosen)
    return [_shape(draw, kind, longest_prompt, longest_answer) for kind in chosen]


def _shape(draw: random.Random, kind: str, longest_prompt: int, longest_answer: int) -> Shape:
    least, most = draw.choices([(1, 64), (64, 256), (256, 1000), (1000, LONGEST_PROMPT)], [5, 3, 1.5, 0.5])[0]
    prompt = min(draw.randint(least, most), longest_prompt)
    shared = draw.randint(0, prompt - 1) if draw.random() < 0.35 else 0
    sampling: dict[str, Any] = {
        "temperature": 0,
        "max_new_tokens": min(draw.choice([1, 2, 8, 16, 24, 32, 48, 64, 96, LONGEST_ANSWER]), longest_answer),
        "ignore_eos": draw.random() < 0.7,
    }
    extra: dict[str, Any] = {}
    is_streamed, leaves_after, aborted_after = kind in ("streamed", "hang-up"), None, None
    if kind == "log-probs":
        extra = {"return_logprob": True, "top_logprobs_num": draw.choice([0, 2])}
    elif kind == "penalties":
        sampling |= draw.choice(PENALTIES)
    elif kind == "min tokens":
        sampling |= {"min_new_tokens": sampling["max_new_tokens"] // 2, "ignore_eos": False}
    elif kind == "bias":
        sampling["logit_bias"] = draw.choice([{"17": 4.0}, {str(EOS): 3.0, "20": -100.0}])
    elif kind == "stops":
        sampling |= draw.choice(STOPS)
    elif kind == "grammar":
        sampling |= {**draw.choice(GRAMMARS), "ignore_eos": False}
    elif kind == "twice":
        sampling["n"] = 2
    elif kind == "seeded":
        sampling["temperature"] = draw.choice([0.5, 0.8, 1.0, 1.3])
    elif kind == "sampled":
        sampling |= draw.choice(SAMPLINGS)
    elif kind == "hang-up":
        leaves_after, sampling["max_new_tokens"] = draw.randint(1, 6), longest_answer
    elif kind == "abort":
        aborted_after, sampling["max_new_tokens"] = draw.uniform(0.02, 0.3), longest_answer
    prefix = draw.randrange(PREFIXES)
    return Shape(kind, prompt, shared, prefix, sampling, extra, is_streamed, leaves_after, aborted_after)


def name_of(group: str, index: int) -> str:
    """None begins another one: SGLang aborts every request whose id begins with the one that is given."""
    return f"{group}.{index:05}"


def requests_of(number: int, asked: Sequence[Shape], corpus: Sequence[int]) -> list[SoakRequest]:
    """The shapes as the requests of a slice: its own pieces of the corpus, its own seeds."""
    draw = random.Random(f"slice {number}")

    def piece(length: int) -> list[int]:
        start = draw.randrange(len(corpus) - length)
        return list(corpus[start : start + length])

    beginnings = [piece(LONGEST_PROMPT) for _ in range(PREFIXES)]
    requests = []
    for index, shape in enumerate(asked):
        name = name_of(str(number), index)
        prompt = beginnings[shape.prefix][: shape.shared] + piece(shape.prompt - shape.shared)
        sampling = dict(shape.sampling)
        if shape.kind == "seeded":
            sampling["sampling_seed"] = draw.randrange(2**31)
        payload = {"rid": name, "input_ids": prompt, "sampling_params": sampling, **shape.extra}
        if sampling.get("n", 1) > 1:
            del payload["rid"]
        requests.append(
            SoakRequest(name, shape.kind, payload, shape.is_streamed, shape.leaves_after, shape.aborted_after)
        )
    return requests


def burst_of(count: int, corpus: Sequence[int]) -> list[SoakRequest]:
    """Short greedy requests, to be sent at the same moment."""
    draw = random.Random("burst")
    requests = []
    for index in range(count):
        start = draw.randrange(len(corpus) - 30)
        prompt = list(corpus[start : start + draw.randint(1, 30)])
        sampling = {"temperature": 0, "max_new_tokens": draw.choice([2, 5, 9, 12]), "ignore_eos": True}
        name = name_of("burst", index)
        payload = {"rid": name, "input_ids": prompt, "sampling_params": sampling}
        requests.append(SoakRequest(name, "greedy", payload))
    return requests
