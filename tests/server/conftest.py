"""Servers for a test session: one warm process that forks them, and stock oracles that stay up."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from serving import ENVIRONMENT, Oracle, common_flags

from sglang_ddtree_patch.launch.server_process import ServerProcess
from sglang_ddtree_patch.launch.server_template import ServerTemplate

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.server)


@pytest.fixture(scope="session")
def template() -> Iterator[ServerTemplate]:
    """Forks servers; knows the test plugins in planting/."""
    with ServerTemplate({**ENVIRONMENT, "PYTHONPATH": str(HERE / "planting")}) as warm:
        yield warm


@pytest.fixture(scope="session")
def stock_gqa(template: ServerTemplate) -> Iterator[Oracle]:
    """The stock CPU backend for GQA: torch_native, page size 1; made definite by planting/definite_stock.py.

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
    """The stock backend that serves MLA on a CPU: Triton's, interpreted."""
    flags = [*common_flags("tiny-mla"), "--attention-backend", "triton"]
    with ServerProcess(flags, environment=ENVIRONMENT, launcher=template.launch, grace=0) as server:
        yield Oracle(server)
