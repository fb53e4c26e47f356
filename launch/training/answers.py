"""How the target answers prompts: by a stock SGLang server, or in plain PyTorch.

An answerer is a context manager that gives a function

    answer(prompts, temperatures, new_tokens) -> for each prompt the new tokens alone, its end token included

and says how many calls of it it takes `at_once`. A server is the faster: it lets answers leave its batch as
they end, keeps it full, and replays CUDA graphs.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Protocol

import torch

from sglang_ddtree_patch.launch.bench.servers import STOCK_ENVIRONMENT
from sglang_ddtree_patch.launch.server_process import CPU_ENVIRONMENT, ServerProcess

Answer = Callable[[Sequence[list[int]], Sequence[float], int], list[list[int]]]
SERVED_REQUESTS = 1024  # in one batch of the server, if its memory holds them
REQUEST_SECONDS = 3600


class Answerer(Protocol):
    at_once: int

    def __enter__(self) -> Answer: ...

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None: ...


class ServedAnswers:
    """Answers of a stock SGLang server, which runs as long as the block."""

    at_once = 4

    def __init__(self, folder: Path, end_ids: Collection[int], device: str):
        flags = ["--model-path", str(folder), "--skip-tokenizer-init"]
        environment = STOCK_ENVIRONMENT
        if device == "cpu":
            flags += ["--device", "cpu", "--dtype", "float32", "--max-total-tokens", "65536"]
            environment = CPU_ENVIRONMENT
        else:
            # PyTorch's sampler, as FlashInfer's is compiled for a minute or two when it is first asked.
            flags += [
                "--dtype", "bfloat16", "--sampling-backend", "pytorch", "--mem-fraction-static", "0.7",
                "--max-running-requests", str(SERVED_REQUESTS),
                "--cuda-graph-max-bs-decode", str(SERVED_REQUESTS),
            ]  # fmt: skip
        self._end_ids = sorted(end_ids)
        self._server = ServerProcess(flags, environment=environment, grace=0)

    def __enter__(self) -> Answer:
        self._server.__enter__()
        print(f"[own text] SGLang is ready after {self._server.ready_seconds:.0f} s", flush=True)
        return self._answer

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        self._server.__exit__(kind, *error)

    def _answer(
        self, prompts: Sequence[list[int]], temperatures: Sequence[float], new_tokens: int
    ) -> list[list[int]]:
        rules = [
            {"temperature": heat, "max_new_tokens": new_tokens, "stop_token_ids": self._end_ids}
            for heat in temperatures
        ]
        payload = {"input_ids": list(prompts), "sampling_params": rules}
        replies = self._server.post_json("/generate", payload, timeout=REQUEST_SECONDS)
        return [reply["output_ids"] for reply in replies]


class PlainAnswers:
    """Answers of a Hugging Face model, a batch at a time."""

    at_once = 1

    def __init__(self, load_model: Callable[[], torch.nn.Module], end_ids: Collection[int], device: str):
        self._load_model, self._end_ids, self._device = load_model, end_ids, device

    def __enter__(self) -> Answer:
        model = self._load_model()
        return lambda prompts, temperatures, new_tokens: continue_batch(
            model, prompts, temperatures, new_tokens, self._end_ids, self._device
        )

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        pass


@torch.no_grad()
def continue_batch(
    model, prompts: Sequence[list[int]], temperatures: Sequence[float], new_tokens: int, end_ids, device: str
) -> list[list[int]]:
    """Continue every prompt by at most `new_tokens`, its end token included; returns the new tokens alone."""
    longest = max(map(len, prompts))
    pad = next(iter(end_ids))
    ids = torch.tensor([[pad] * (longest - len(p)) + p for p in prompts], device=device)
    lengths = torch.tensor([len(p) for p in prompts], device=device)
    mask = (torch.arange(longest, device=device) >= longest - lengths[:, None]).long()
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    heat = torch.tensor(temperatures, device=device, dtype=torch.float32)[:, None]
    ends = torch.tensor(sorted(end_ids), device=device)
    step, cache, made = ids, None, []
    is_done = torch.zeros(len(prompts), dtype=torch.bool, device=device)
    for count in range(new_tokens):
        out = model(
            input_ids=step,
            attention_mask=mask,
            position_ids=positions,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        cache, logits = out.past_key_values, out.logits[:, -1].float()
        # The largest of logits / T plus Gumbel noise is a draw at temperature T.
        noise = -torch.log(-torch.log(torch.rand_like(logits).clamp(1e-20, 1 - 1e-7)))
        step = (logits + heat * noise).argmax(-1, keepdim=True)
        made.append(step)
        is_done |= torch.isin(step[:, 0], ends)
        if count % 16 == 15 and is_done.all():  # each look waits for the device
            break
        mask = torch.cat([mask, mask.new_ones(len(prompts), 1)], dim=1)
        positions = positions[:, -1:] + 1
    rows = torch.cat(made, dim=1).tolist()
    return [cut(row, end_ids) for row in rows]


def cut(tokens: list[int], end_ids) -> list[int]:
    """Up to and with the first end token."""
    end = next((i for i, token in enumerate(tokens) if token in end_ids), len(tokens))
    return tokens[: end + 1]
