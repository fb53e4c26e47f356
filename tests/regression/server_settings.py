"""Random servers: what a seed makes of every setting that must not change an answer."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from serving import CONTEXT_LENGTH, ENVIRONMENT, common_flags, ddtree_flags

MLA = "tiny-mla"


@dataclass(frozen=True)
class ServerSettings:
    """One DDTREE server: the flags and variables it is started with, beside the model's."""

    model: str
    page: int
    width: int
    chunk: int
    candidates: int
    has_planted_paths: bool  # drafts hold the true continuation behind decoys: planting/planted_paths.py
    flags: list[str] = field(default_factory=list)

    @property
    def arguments(self) -> list[str]:
        chunk = ["--chunked-prefill-size", str(self.chunk)]
        return ddtree_flags(self.model, self.page, self.width, *chunk, *self.flags)

    @property
    def environment(self) -> dict[str, str]:
        return {**ENVIRONMENT, "SGLANG_DDTREE_TOPK": str(self.candidates)}

    def __str__(self) -> str:
        planted = " planted" if self.has_planted_paths else ""
        return (
            f"{self.model} page {self.page} width {self.width} candidates {self.candidates} "
            f"chunk {self.chunk}{planted} {' '.join(self.flags)}"
        )


def server_settings(seed: int, model: str) -> ServerSettings:
    draw = random.Random(f"server {seed}")
    page = draw.choice([1, 1, 2, 4, 16, 16, 32, 64, 128])
    width = draw.choice([1, 2, 3, 5, 8, 13, 16, 17, 31, 32, 33, 63, 64, 65, 100, 256])
    # A chunk is a whole number of pages.
    chunk = draw.choice([n for n in (16, 32, 64, 128, 512) if n % page == 0])
    has_planted_paths = draw.random() < 0.5
    flags = []
    if draw.random() < 0.35:
        flags.append("--disable-overlap-schedule")
    if draw.random() < 0.3:
        flags.append("--disable-radix-cache")
    if draw.random() < 0.3:
        # Room for one request to the end of its context, little more: others are retracted.
        room = CONTEXT_LENGTH + 2 * max(width, 8) + 3 * page
        pool = (room + draw.choice([64, 256, 700])) // page * page
        flags += ["--max-total-tokens", str(pool), "--schedule-conservativeness", "0.05"]
    flags += ["--max-running-requests", str(draw.choice([1, 3, 6, 16, 16]))]
    flags += ["--schedule-policy", draw.choice(["fcfs", "lpm", "dfs-weight"])]
    flags += ["--stream-interval", str(draw.choice([1, 1, 3, 8]))]
    if draw.random() < 0.4:
        flags += ["--speculative-dflash-block-size", str(draw.choice([2, 3, 5, 8, 12]))]
    if draw.random() < 0.2:
        flags += ["--speculative-draft-window-size", str(draw.choice([1, 16, 50]))]
    candidates = draw.choice([2, 4, 8, 20] if has_planted_paths else [1, 2, 4, 8, 20, 64])
    return ServerSettings(model, page, width, chunk, candidates, has_planted_paths, flags)


def stock_arguments(model: str) -> list[str]:
    """Stock SGLang without speculation, answering one request at a time; see `stock_gqa` in the conftest."""
    backend = "triton" if model == MLA else "torch_native"
    return [*common_flags(model), "--attention-backend", backend, "--disable-overlap-schedule"]


STOCK_ENVIRONMENT = {**ENVIRONMENT, "DDTREE_TEST_ORACLE": "1"}
