"""The rule by which bf16 answers are judged lets near ties through and nothing else."""

from __future__ import annotations

import pytest
from bf16_rule import TOP, OracleAnswer, ask_oracle
from serving import Request

PROMPT = (7, 8)
# The likeliest token of each place, and by how much it leads the next: one is a near tie.
TOKENS, GAPS = (11, 12, 13, 14), (3.0, 0.0625, 2.0, 5.0)
SECOND = 100  # added to a token: the second of its place


class Stock:
    """Answers as a server does whose gaps are GAPS, and other ones when it prefills."""

    def __init__(self, moved: tuple[float, ...] = (0.0, 0.0, 0.0, 0.0)):
        self.moved = moved

    def post_json(self, path: str, payload: dict) -> dict:
        assert payload["top_logprobs_num"] == TOP
        if payload["sampling_params"]["max_new_tokens"] > 1:
            assert payload["input_ids"] == [*PROMPT]
            places = [self.place(token, gap) for token, gap in zip(TOKENS, GAPS, strict=True)]
            meta = {"output_top_logprobs": places, "output_token_logprobs": [place[0] for place in places]}
            return {"output_ids": [*TOKENS], "meta_info": meta}
        assert payload["input_ids"] == [*PROMPT, *TOKENS]
        assert payload["logprob_start_len"] == len(PROMPT) - 1
        gaps = [gap + move for gap, move in zip(GAPS, self.moved, strict=True)]
        places = [self.place(token, gap) for token, gap in zip(TOKENS, gaps, strict=True)]
        chosen = [[None, PROMPT[-1], None], *([-0.1, token, None] for token in TOKENS)]
        return {"meta_info": {"input_token_logprobs": chosen, "input_top_logprobs": [None, *places]}}

    @staticmethod
    def place(token: int, gap: float) -> list:
        entries = [[-0.1, token, None], [-0.1 - gap, token + SECOND, None], [-9.0, 3, None]]
        return sorted(entries, key=lambda entry: -entry[0])


def answer(same: Stock, other: Stock) -> OracleAnswer:
    return ask_oracle(same, other, Request("one", PROMPT, 4))


def found(at: int, token: int) -> tuple[int, ...]:
    return (*TOKENS[:at], token, *TOKENS[at + 1 :])


NOISE_ON_OTHER_KERNELS = Stock((0.0, 0.0, 0.0625, 0.0))


def test_a_near_tie_is_allowed_within_the_noise_of_either_stock_pair() -> None:
    near = found(1, TOKENS[1] + SECOND)
    assert not answer(Stock(), Stock()).judge(near).is_lossless
    for same, other in ((NOISE_ON_OTHER_KERNELS, Stock()), (Stock(), NOISE_ON_OTHER_KERNELS)):
        verdict = answer(same, other).judge(near)
        assert (verdict.first_difference, verdict.gap) == (1, pytest.approx(0.0625))
        assert verdict.is_lossless
        assert not verdict.is_strictly_lossless
        assert not verdict.others_say_so_too
    assert answer(Stock(), Stock((0.0, -0.1, 0.0, 0.0))).judge(near).others_say_so_too


@pytest.mark.parametrize("at", [0, 2, 3])
def test_the_second_best_token_of_a_sure_place_is_lossy(at: int) -> None:
    oracle = answer(NOISE_ON_OTHER_KERNELS, NOISE_ON_OTHER_KERNELS)
    verdict = oracle.judge(found(at, TOKENS[at] + SECOND))
    assert (verdict.first_difference, verdict.gap) == (at, pytest.approx(GAPS[at]))
    assert not verdict.is_lossless


def test_a_near_tie_lets_its_two_tokens_through_and_no_third() -> None:
    oracle = answer(NOISE_ON_OTHER_KERNELS, Stock())
    assert not oracle.judge(found(1, 3)).is_lossless
    verdict = oracle.judge(found(1, 555))  # none of the top
    assert verdict.gap is None
    assert not verdict.is_lossless


def test_an_answer_that_ends_elsewhere_is_lossy() -> None:
    oracle = answer(NOISE_ON_OTHER_KERNELS, Stock())
    assert oracle.judge(TOKENS).is_lossless
    for other in (TOKENS[:-1], (*TOKENS, 15), ()):
        assert not oracle.judge(other).is_lossless


def test_its_own_controls_are_wrong_where_it_is_surest() -> None:
    oracle = answer(NOISE_ON_OTHER_KERNELS, Stock())
    assert oracle.wrong() == found(3, TOKENS[3] + SECOND)
    assert not oracle.judge(oracle.wrong()).is_lossless
    assert oracle.near_share == 1 / 4
