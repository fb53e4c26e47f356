"""The GPU soak's judge knows the noise that a seed gives, and holds each difference to the right one."""

from __future__ import annotations

import itertools

import pytest
import torch
from sglang.srt.layers import sampler
from soak_judge import Difference, Prefilled, before_temperature, gumbel, murmur, noise_of
from soak_mix import SoakRequest, burst_of, requests_of, shapes

from sglang_ddtree_patch.cpu.hooks import murmur_hash32

SEEDS = [0, 7, 2**31 - 1, 2**40 + 3]
TOKENS = 768


def test_the_noise_of_a_seed_is_the_samplers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampler, "murmur_hash32", murmur_hash32)
    for seed in SEEDS:
        for position in (0, 1, 999):
            noise = [gumbel(seed, position, token) for token in range(TOKENS)]
            drawn = sampler.multinomial_with_seed(
                torch.zeros(1, TOKENS), torch.tensor([seed]), torch.tensor([position])
            )
            assert noise.index(max(noise)) == int(drawn)
            hashed = murmur_hash32(torch.tensor([seed]), torch.tensor([position]), torch.arange(TOKENS))
            words = (seed & 0xFFFFFFFF, seed >> 32)
            assert [murmur(*words, position, token) for token in range(TOKENS)] == hashed[0].tolist()


def test_the_gap_of_a_seeded_draw_counts_its_noise_times_the_temperature() -> None:
    sampling = {"temperature": 0.5, "sampling_seed": 3}
    request = SoakRequest("one", "seeded", {"input_ids": [1, 2], "sampling_params": sampling})
    one = Difference(request, at=1, expected=(10, 11), found=12, gap=None)
    prefilled = Prefilled(places=(), answer_at=0, pair={11: -1.0, 12: -1.5})
    lead = gumbel(3, 2, 11) - gumbel(3, 2, 12)
    assert prefilled.seeded_gap(one) == pytest.approx(0.5 + 0.5 * lead)


def places(*gaps: float) -> tuple:
    return tuple(((-0.25, 10), (-0.25 - gap, 11)) for gap in gaps)


def test_the_noise_of_a_request_counts_what_its_decode_differs_by() -> None:
    """Decode and verify multiply matrices of other shapes than a prefill, whatever its attention."""
    here, there = Prefilled(places(9.0, 1.0, 2.0), 1, {}), Prefilled(places(9.0, 1.0, 2.125), 1, {})
    for kind, sampling, noise in (
        ("greedy", {"temperature": 0}, 0.5),
        ("seeded", {"temperature": 0.5, "sampling_seed": 3}, 0.5),
        ("penalties", {"temperature": 0, "frequency_penalty": 0.4}, 0.125),  # its log-probs are penalized
    ):
        request = SoakRequest("one", kind, {"input_ids": [1, 2], "sampling_params": sampling})
        decoded = before_temperature(
            request, places(*(gap / (sampling["temperature"] or 1) for gap in (1.5, 2)))
        )
        one = Difference(request, at=1, expected=(10, 10), found=11, gap=None, decoded=decoded)
        assert noise_of(one, here, there) == pytest.approx(noise)


def test_no_request_is_aborted_with_another():
    """SGLang aborts every request whose id begins with the one that is given."""
    words, asked = list(range(5000)), shapes(150)
    requests = [*requests_of(1, asked, words), *requests_of(11, asked, words), *burst_of(150, words)]
    names = sorted(request.name for request in requests)
    assert len(set(names)) == len(requests)
    assert not [pair for pair in itertools.pairwise(names) if pair[1].startswith(pair[0])]
