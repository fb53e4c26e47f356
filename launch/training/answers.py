"""How the target answers prompts: by a stock SGLang server, or in plain PyTorch.

An answerer is a context manager that gives a function

    answer(prompts, temperatures, new_tokens) -> for each prompt the new tokens alone, its end token included

and says how many calls of it it takes `at_once`. A server is the faster: it lets answers leave its batch as
they end, keeps it full, and replays CUDA graphs. Its scheduler is one Python process that looks at every
request in every step, which for a small target takes longer than the step itself; so several servers share
the GPU.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import Queue
from typing import Protocol

import torch

from sglang_ddtree_patch.launch.bench.servers import STOCK_ENVIRONMENT
from sglang_ddtree_patch.launch.server_process import CPU_ENVIRONMENT, ServerProcess

Answer = Callable[[Sequence[list[int]], Sequence[float], int], list[list[int]]]
SERVED_REQUESTS = 1024  # in one batch of a server, if its memory holds them
GRAPH_SIZES = (1, 4, 16, 64, 128, 256, 384, 512, 640, 768, 896, 1024)  # few, as each takes time at the start
SERVED_TOKENS = 600_000  # a server's cache at most, so that several fit: 13.8 GB for SmolLM2
CALLS = 6  # at once to a server: of 256 prompts each they keep its batch full while others wait
REQUEST_SECONDS = 3600


class Answerer(Protocol):
    at_once: int

    def __enter__(self) -> Answer: ...

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None: ...


@contextlib.contextmanager
def callers(count: int) -> Iterator[ThreadPoolExecutor]:
    """Threads that ask an answerer. Who leaves early does not wait for them: servers that stop end calls."""
    pool = ThreadPoolExecutor(count)
    try:
        yield pool
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


class ServedAnswers:
    """Answers of stock SGLang servers, which run as long as the block."""

    def __init__(self, folder: Path, end_ids: Collection[int], device: str, servers: int):
        # No prompt is a longer one's beginning, so a tree of prefixes would be work for nothing.
        flags = ["--model-path", str(folder), "--skip-tokenizer-init", "--disable-radix-cache"]
        environment = STOCK_ENVIRONMENT
        if device == "cpu":
            flags += ["--device", "cpu", "--dtype", "float32", "--max-total-tokens", "65536"]
            environment = CPU_ENVIRONMENT
        else:
            # PyTorch's sampler, as FlashInfer's is compiled for a minute or two when it is first asked.
            flags += [
                "--dtype", "bfloat16", "--sampling-backend", "pytorch", "--mem-fraction-static", "0.7",
                "--max-total-tokens", str(SERVED_TOKENS), "--max-running-requests", str(SERVED_REQUESTS),
                "--cuda-graph-max-bs-decode", str(SERVED_REQUESTS),
                "--cuda-graph-bs-decode", *map(str, GRAPH_SIZES), "--disable-prefill-cuda-graph",
            ]  # fmt: skip
        self._end_ids = sorted(end_ids)
        self._servers = [ServerProcess(flags, environment=environment, grace=0) for _ in range(servers)]
        self._free: Queue[ServerProcess] = Queue()  # each as often as it takes one call more
        self.at_once = CALLS * servers

    def __enter__(self) -> Answer:
        with ThreadPoolExecutor(len(self._servers)) as pool:
            starts = [pool.submit(server.__enter__) for server in self._servers]
            try:
                slowest = max(start.result().ready_seconds for start in starts)
            except BaseException as error:
                self.__exit__(type(error))  # those that still start find themselves ended
                raise
        print(f"[own text] {len(starts)} SGLang servers are ready after {slowest:.0f} s", flush=True)
        for server in CALLS * self._servers:
            self._free.put(server)
        return self._answer

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        for server in self._servers:
            server.__exit__(kind, *error)

    def _answer(
        self, prompts: Sequence[list[int]], temperatures: Sequence[float], new_tokens: int
    ) -> list[list[int]]:
        rules = [
            {"temperature": heat, "max_new_tokens": new_tokens, "stop_token_ids": self._end_ids}
            for heat in temperatures
        ]
        payload = {"input_ids": list(prompts), "sampling_params": rules}
        server = self._free.get()
        try:
            replies = server.post_json("/generate", payload, timeout=REQUEST_SECONDS)
        finally:
            self._free.put(server)
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
