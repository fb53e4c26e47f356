"""Many short requests at the same moment."""

from __future__ import annotations

from dataclasses import replace

from serving import Oracle, Request, ask_all, differences, text_tokens
from workloads import EOS

from sglang_ddtree_patch.launch.server_process import ServerProcess

KINDS = [
    Request(f"kind {n}", text_tokens("tiny-gqa", 1 + 2 * n, start=n), 5, {"logit_bias": {str(EOS): 1.0}})
    for n in range(10)
]


def burst_differences(stock: Oracle, ours: ServerProcess, count: int) -> list[str]:
    """Send `count` requests of ten kinds at once; one line for each that is not answered as by stock."""
    said = stock.answers(KINDS, one_by_one=True)
    kinds = {str(n): KINDS[n % len(KINDS)] for n in range(count)}
    expected = {name: said[kind.name] for name, kind in kinds.items()}
    many = [replace(kind, name=name) for name, kind in kinds.items()]
    answers = ask_all(ours, many, stagger=0.0)
    return [f"{n}: not answered" for n in expected.keys() - answers.keys()] + differences(expected, answers)
