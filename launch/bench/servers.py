"""The servers a benchmark compares: which flags make which algorithm."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from sglang_ddtree_patch.launch.bench.models import Subject
from sglang_ddtree_patch.launch.server_process import CPU_ENVIRONMENT
from sglang_ddtree_patch.settings import ALGORITHM, AUTO, BACKEND, FIXED, WIDTHS_VARIABLE

# Keeps any plugin, this one included, out of a server that is to be stock.
STOCK_ENVIRONMENT = {"SGLANG_PLUGINS": "none"}

PLAIN, DFLASH, DDTREE = "plain", "dflash", "ddtree"
DDTREE_AUTO = "ddtree-auto"  # each round chooses its width
# The chain on the stock Triton backend at page 1, where tree ports had to run: its verify walks the prefix
# in one program a head and query tile.
DFLASH_TRITON_PAGE1 = "dflash-triton-page1"


@dataclass(frozen=True)
class Contender:
    """One server of the comparison."""

    algorithm: str  # as rows call it
    width: int  # rows of a verify, root included, at most; 1 without speculation
    flags: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    page_size: int | None = None  # None: SGLang's own choice

    def __str__(self) -> str:
        return self.algorithm if self.width == 1 else f"{self.algorithm}, {self.width} rows"


def contender(algorithm: str, width: int, subject: Subject, page_size: int, on_cpu: bool) -> Contender:
    """The server for an algorithm; `width` is DDTREE's, a chain verifies the drafter's block."""
    drafted = ("--speculative-draft-model-path", subject.draft)
    if algorithm == PLAIN:
        return Contender(PLAIN, 1, (), STOCK_ENVIRONMENT)
    if algorithm in (DDTREE, DDTREE_AUTO):
        widths = {WIDTHS_VARIABLE: AUTO if algorithm == DDTREE_AUTO else FIXED}
        flags: tuple[str, ...] = (
            "--speculative-algorithm", ALGORITHM, "--attention-backend", BACKEND,
            "--speculative-num-draft-tokens", str(width), *drafted,
        )  # fmt: skip
        return _paged(Contender(algorithm, width, flags, widths, page_size))
    chain: tuple[str, ...] = ("--speculative-algorithm", "DFLASH", *drafted)
    if algorithm == DFLASH_TRITON_PAGE1:
        flags = (*chain, "--attention-backend", "triton")
        return _paged(Contender(algorithm, subject.draft_block, flags, STOCK_ENVIRONMENT, page_size=1))
    if on_cpu:
        chain = (*chain, "--attention-backend", "triton")  # the only stock one that verifies on a CPU
    return _paged(Contender(DFLASH, subject.draft_block, chain, STOCK_ENVIRONMENT, page_size))


def _paged(server: Contender) -> Contender:
    flags = (*server.flags, "--page-size", str(server.page_size))
    return Contender(server.algorithm, server.width, flags, server.environment, server.page_size)


def server_flags(
    server: Contender, subject: Subject, given: Sequence[str], most_requests: int, on_cpu: bool
) -> list[str]:
    """All SGLang flags of a server; the user's stand last, where they win."""
    # Without a bound SGLang captures CUDA graphs for many more requests than are sent.
    sized: tuple[str, ...] = ("--max-running-requests", str(max(most_requests, 8)))
    sized += (
        ("--device", "cpu", "--dtype", "float32")
        if on_cpu
        else ("--cuda-graph-max-bs-decode", str(most_requests))
    )
    return ["--model-path", subject.target, *subject.flags, *sized, *server.flags, *given]


def server_environment(server: Contender, on_cpu: bool) -> dict[str, str]:
    return {**server.environment, **(CPU_ENVIRONMENT if on_cpu else {})}
