"""Order and choice of tests: those that start no server come first, GPU tests run where there is a GPU.

For those that start servers: one warm process that forks them, and stock oracles that stay up.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from serving import ENVIRONMENT, Oracle, common_flags

from sglang_ddtree_patch.launch.server_process import ServerProcess
from sglang_ddtree_patch.launch.server_template import ServerTemplate

SERVER_TESTS = Path(__file__).parent / "server"
REGRESSION_TESTS = Path(__file__).parent / "regression"

# Without a GPU our Triton kernels run in its interpreter, which Triton must know before it is imported, and
# SGLang's compiled functions run as they stand.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    limit_coverage(items)
    for item in items:
        if not {SERVER_TESTS, REGRESSION_TESTS}.isdisjoint(item.path.parents):
            item.add_marker(pytest.mark.server)
    items.sort(key=lambda item: item.get_closest_marker("server") is not None)
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="no NVIDIA GPU"))


def limit_coverage(items: list[pytest.Item]) -> None:
    """Measure the first and the last case of each test: measuring doubles their time, others add no line."""
    ends: dict[str, list[pytest.Item]] = {}
    for item in items:
        if not item.get_closest_marker("gpu"):
            ends.setdefault(item.nodeid.partition("[")[0], []).append(item)
    measured = {item.nodeid for cases in ends.values() for item in (cases[0], cases[-1])}
    for item in items:
        if item.nodeid not in measured:
            item.add_marker(pytest.mark.no_cover)


@pytest.fixture(scope="session")
def template() -> Iterator[ServerTemplate]:
    """Forks servers; knows the test plugins in planting/."""
    with ServerTemplate({**ENVIRONMENT, "PYTHONPATH": str(SERVER_TESTS / "planting")}) as warm:
        yield warm


@pytest.fixture(scope="session")
def stock_gqa(template: ServerTemplate) -> Iterator[Oracle]:
    """The stock CPU backend for GQA: torch_native, page size 1; made definite by
    server/planting/definite_stock.py.

    Synchronous, because stock's overlap scheduler hands penalties each token a step late.
    """
    flags = [
        *common_flags("tiny-gqa"), "--attention-backend", "torch_native", "--disable-overlap-schedule",
        "--enable-custom-logit-processor",
    ]  # fmt: skip
    environment = {**ENVIRONMENT, "DDTREE_TEST_ORACLE": "1"}
    with ServerProcess(flags, environment=environment, launcher=template.launch, grace=0) as server:
        yield Oracle(server)


@pytest.fixture(scope="session")
def stock_mla(template: ServerTemplate) -> Iterator[Oracle]:
    """The stock backend that serves MLA on a CPU: Triton's, interpreted. Definite as the other."""
    flags = [*common_flags("tiny-mla"), "--attention-backend", "triton", "--disable-overlap-schedule"]
    environment = {**ENVIRONMENT, "DDTREE_TEST_ORACLE": "1"}
    with ServerProcess(flags, environment=environment, launcher=template.launch, grace=0) as server:
        yield Oracle(server)
