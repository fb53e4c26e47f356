"""Long accepted paths that wind through the block, and the control that proves they need the commit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from serving import ENVIRONMENT, Oracle, Request, ask_all, ddtree_flags, differences, text_tokens, used_tokens

from sglang_ddtree_patch.launch.server_process import ServerProcess
from sglang_ddtree_patch.launch.server_template import ServerTemplate

REQUESTS = [
    Request(f"length {n}", text_tokens("tiny-gqa", n, start=n), 48, {"ignore_eos": True})
    for n in (3, 16, 31, 50, 77, 130)
]


@pytest.fixture(scope="module")
def expected(stock_gqa: Oracle) -> dict:
    return stock_gqa.answers(REQUESTS)


@pytest.fixture
def planted(expected: dict, tmp_path: Path) -> dict[str, str]:
    """The environment of a server whose drafts hold the true continuation behind decoys."""
    sequences = [[*request.input_ids, *expected[request.name].tokens] for request in REQUESTS]
    path = tmp_path / "sequences.json"
    path.write_text(json.dumps(sequences))
    return {**ENVIRONMENT, "DDTREE_TEST_PLANT": str(path)}


@pytest.mark.parametrize(
    ("page", "width", "flags"),
    [(1, 20, ()), (16, 33, ()), (64, 64, ()), (16, 5, ()), (64, 33, ("--disable-overlap-schedule",))],
)
def test_winding_paths_commit_exactly(
    template: ServerTemplate, expected: dict, planted: dict, page: int, width: int, flags: tuple
) -> None:
    arguments = ddtree_flags("tiny-gqa", page, width, *flags)
    with ServerProcess(arguments, environment=planted, launcher=template.launch, grace=0) as server:
        answers = ask_all(server, REQUESTS)
        assert not differences(expected, answers)
        rounds = sum(answer.meta["spec_verify_ct"] for answer in answers.values())
        accepted = sum(answer.meta["spec_num_correct_drafts"] for answer in answers.values())
        # The paths really are long: a width of 5 leaves room for two or three of them a round.
        assert accepted / rounds > (1.5 if width == 5 else 4)
        assert used_tokens(server) == 0


def test_without_the_commit_the_same_paths_give_wrong_tokens(
    template: ServerTemplate, expected: dict, planted: dict
) -> None:
    arguments = ddtree_flags("tiny-gqa", 16, 33)
    environment = {**planted, "DDTREE_TEST_NO_COMMIT": "1"}
    with ServerProcess(arguments, environment=environment, launcher=template.launch, grace=0) as server:
        answers = ask_all(server, REQUESTS)
    assert len(differences(expected, answers)) >= len(REQUESTS) - 1
