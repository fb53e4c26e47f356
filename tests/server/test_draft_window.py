"""Drafters that see the last positions alone, or stretched ones: the text is the target's, and drafts fit."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from serving import ENVIRONMENT, Oracle, Request, ask_all, ddtree_flags, differences, text_tokens, used_tokens

from sglang_ddtree_patch import model_catalog
from sglang_ddtree_patch.launch.server_process import ServerProcess
from sglang_ddtree_patch.launch.server_template import ServerTemplate


@pytest.mark.parametrize(
    ("page", "width", "window", "accepted_a_round"),
    [(16, 17, 32, 2.0), (1, 4, 24, 1.1)],  # found: 2.2 and 1.3; with half the window 1.4 and 0.7
    ids=["wider than the block", "narrower"],
)
def test_a_drafter_with_a_window_drafts_and_the_tokens_are_stock(
    template: ServerTemplate, stock_gqa: Oracle, page: int, width: int, window: int, accepted_a_round: float
) -> None:
    """Prompts on both sides of the window, a page boundary inside it, and a request that outgrows it."""
    requests = [
        Request(f"length {n}", text_tokens("tiny-gqa", n), 40, {"ignore_eos": True})
        for n in (1, window - 1, window, window + 9, 200)
    ]
    expected = stock_gqa.answers(requests)
    arguments = ddtree_flags("tiny-gqa", page, width, "--speculative-draft-window-size", str(window))
    with ServerProcess(arguments, environment=ENVIRONMENT, launcher=template.launch, grace=0) as server:
        answers = ask_all(server, requests)
        assert not differences(expected, answers)
        rounds = sum(answer.meta["spec_verify_ct"] for answer in answers.values())
        accepted = sum(answer.meta["spec_num_correct_drafts"] for answer in answers.values())
        assert accepted > accepted_a_round * rounds, f"{accepted} accepted in {rounds} rounds"
        assert used_tokens(server) == 0
        assert f"draft_window_size={window}, compact_cache=True" in server.log_path.read_text()


def test_a_drafter_with_yarn_drafts_and_the_tokens_are_stock(
    template: ServerTemplate, stock_gqa: Oracle, tmp_path: Path
) -> None:
    """Trained without, so that it drafts worse with it: that it does shows that the stretching arrives."""
    requests = [
        Request(f"length {n}", text_tokens("tiny-gqa", n, start=n), 40, {"ignore_eos": True})
        for n in (1, 16, 100, 300)
    ]
    expected = stock_gqa.answers(requests)
    accepted = {}
    for factor in (1.0, 64.0):
        draft = tmp_path / f"yarn {factor}"
        shutil.copytree(model_catalog.path("tiny-gqa") / "draft", draft)
        config = json.loads((draft / "config.json").read_text())
        config["rope_scaling"] = {
            "rope_type": "yarn", "factor": factor, "original_max_position_embeddings": 4096,
        }  # fmt: skip
        (draft / "config.json").write_text(json.dumps(config))
        arguments = ddtree_flags("tiny-gqa", 16, 17, "--speculative-draft-model-path", str(draft))
        with ServerProcess(arguments, environment=ENVIRONMENT, launcher=template.launch, grace=0) as server:
            answers = ask_all(server, requests)
            assert not differences(expected, answers)
            assert used_tokens(server) == 0
        accepted[factor] = sum(answer.meta["spec_num_correct_drafts"] for answer in answers.values())
    assert 0 < accepted[64.0] < accepted[1.0], accepted
