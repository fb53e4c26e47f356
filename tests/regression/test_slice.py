"""A fixed slice of the soak: generated requests to two servers of unlike settings, compared with stock."""

from __future__ import annotations

from pathlib import Path

import pytest
from server_settings import server_settings
from serving import Oracle
from soak import OurServer, judged_cases, reproducer, run_case

from sglang_ddtree_patch.launch.server_template import ServerTemplate

MODEL = "tiny-gqa"
CASES = 3
# Planted paths and retraction under the overlap scheduler; single slots and short drafts under the other.
SERVER_SEEDS = (70, 63)


@pytest.mark.parametrize("server_seed", SERVER_SEEDS)
def test_a_client_sees_what_stock_shows(
    template: ServerTemplate, stock_gqa: Oracle, tmp_path: Path, server_seed: int
) -> None:
    settings = server_settings(server_seed, MODEL)
    seeds = range(1000 * server_seed, 1000 * server_seed + CASES)
    with OurServer(settings, template.launch, tmp_path) as ours:
        for case in judged_cases(stock_gqa.server, settings, seeds):
            different = run_case(ours, case).differences
            how = reproducer(MODEL, server_seed, case.seed)
            assert not different, "\n".join([*different, how])
