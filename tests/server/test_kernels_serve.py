"""The GPU kernels serve the CPU server too, through Triton's interpreter."""

from __future__ import annotations

from serving import ENVIRONMENT, Oracle, Request, ask_all, ddtree_flags, differences, text_tokens, used_tokens

from sglang_ddtree_patch.launch.server_process import ServerProcess
from sglang_ddtree_patch.launch.server_template import ServerTemplate


def test_the_triton_kernels_serve_the_same_tokens(template: ServerTemplate, stock_gqa: Oracle) -> None:
    requests = [
        Request(f"length {n}", text_tokens("tiny-gqa", n), 12, {"ignore_eos": True}) for n in (1, 17, 40)
    ]
    environment = {**ENVIRONMENT, "SGLANG_DDTREE_KERNEL": "triton"}
    # No graph is captured on a CPU, whichever kernel runs.
    arguments = ddtree_flags("tiny-gqa", 16, 17, "--disable-cuda-graph")
    with ServerProcess(arguments, environment=environment, launcher=template.launch, grace=0) as server:
        assert not differences(stock_gqa.answers(requests), ask_all(server, requests))
        assert ": the triton kernel." in server.log_path.read_text()


def test_every_kernel_of_a_round_serves_the_same_tokens(template: ServerTemplate, stock_gqa: Oracle) -> None:
    """Slots, candidates, tree, masks, attention, accept and commit: what a GPU runs between the matrices."""
    requests = [
        Request(f"length {n}", text_tokens("tiny-gqa", n), 12, {"ignore_eos": True}) for n in (1, 17, 40)
    ]
    environment = {**ENVIRONMENT, "DDTREE_TEST_KERNELS": "1"}
    arguments = ddtree_flags("tiny-gqa", 16, 17, "--disable-cuda-graph")
    with ServerProcess(arguments, environment=environment, launcher=template.launch, grace=0) as server:
        answers = ask_all(server, requests)
        assert not differences(stock_gqa.answers(requests), answers)
        assert sum(answer.meta["spec_num_correct_drafts"] for answer in answers.values()) > 0
        assert ": the triton kernel." in server.log_path.read_text()
        assert used_tokens(server) == 0
