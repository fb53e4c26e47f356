"""A float8 KV cache: the same tokens as stock SGLang with the same cache."""

from __future__ import annotations

from serving import ENVIRONMENT, Request, ask_all, common_flags, ddtree_flags, differences, text_tokens

from sglang_ddtree_patch.launch.server_process import ServerProcess
from sglang_ddtree_patch.launch.server_template import ServerTemplate

FLOAT8 = ("--kv-cache-dtype", "fp8_e4m3")


def serve(template: ServerTemplate, arguments: list[str], requests: list[Request]) -> dict:
    with ServerProcess(arguments, environment=ENVIRONMENT, launcher=template.launch, grace=0) as server:
        return ask_all(server, requests)


def test_gqa_tokens_equal_stock_with_the_same_cache(template: ServerTemplate) -> None:
    requests = [
        Request(f"length {n}", text_tokens("tiny-gqa", n, start=n), 32, {"ignore_eos": True})
        for n in (1, 15, 16, 40, 100)
    ]
    stock = [*common_flags("tiny-gqa"), "--attention-backend", "torch_native", *FLOAT8]
    expected = serve(template, stock, requests)
    answers = serve(template, ddtree_flags("tiny-gqa", 16, 17, *FLOAT8), requests)
    assert not differences(expected, answers)
    assert sum(answer.meta["spec_num_correct_drafts"] for answer in answers.values()) > 0
