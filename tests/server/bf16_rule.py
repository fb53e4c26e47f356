"""When two bf16 servers may differ: only where the target itself cannot tell its top two tokens apart.

Kernels that add in different orders round differently, so plain decoding and tree verify may break a near tie
differently, and everything behind that token then differs too. A first difference is allowed only where the
gap between the oracle's top two log-probs is within twice the noise of the oracle itself (both tokens may
have moved by it): the largest difference it shows between decoding a token and prefilling the same prefix.
What a stock server on other kernels says of that prefix is noted beside it, and decides nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

from serving import Request

from sglang_ddtree_patch.launch.server_process import ServerProcess


@dataclass(frozen=True)
class Verdict:
    """How one request compared; `first_difference` is None where all tokens agree."""

    name: str
    tokens: int
    first_difference: int | None
    gap: float | None  # between the oracle's top two log-probs at the first difference
    noise: float  # of the oracle over this request's tokens
    noise_between_kernels: float  # the same, between the oracle and stock SGLang on other kernels

    @property
    def is_lossless(self) -> bool:
        return self.first_difference is None or self.gap <= 2 * self.noise

    def as_row(self) -> dict:
        return {**asdict(self), "lossless": self.is_lossless}


def compare(
    oracle: ServerProcess, other_kernels: ServerProcess, request: Request, found: Sequence[int]
) -> Verdict:
    """Ask the stock `oracle` for `request` and judge the tokens `found` by the rule above."""
    payload = request.payload | {"return_logprob": True, "top_logprobs_num": 2}
    reply = oracle.post_json("/generate", payload)
    expected = reply["output_ids"]
    decoded = [entry[0] for entry in reply["meta_info"]["output_token_logprobs"]]
    noise, between_kernels = (
        max(abs(a - b) for a, b in zip(decoded, prefill(server, request, expected), strict=True))
        for server in (oracle, other_kernels)
    )
    pairs = enumerate(zip(expected, found, strict=False))
    first = next((index for index, (a, b) in pairs if a != b), None)
    gap = None
    if first is not None:
        best, second = reply["meta_info"]["output_top_logprobs"][first][:2]
        gap = best[0] - second[0]
    return Verdict(request.name, len(expected), first, gap, noise, between_kernels)


def prefill(server: ServerProcess, request: Request, answer: Sequence[int]) -> list[float]:
    """Log-probs of the answer's tokens in one forward of prompt and answer."""
    whole = {
        "input_ids": [*request.input_ids, *answer],
        "sampling_params": {"temperature": 0, "max_new_tokens": 1},
        "return_logprob": True,
        "logprob_start_len": len(request.input_ids) - 1,
    }
    found = server.post_json("/generate", whole)["meta_info"]["input_token_logprobs"]
    return [entry[0] for entry in found][1:]
