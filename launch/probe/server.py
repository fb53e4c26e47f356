"""What a running SGLang server says of itself over HTTP: its algorithm, its limits, its traffic.

Nothing is read from logs, and nothing is asked that stock releases would not answer: a figure that a server
does not give is None here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sglang_ddtree_patch.launch.sglang_client import ServerLost, SGLangClient, read_json, read_text

INFO_PATHS = ("/server_info", "/get_server_info")  # the second is what older releases have
# Positions left free behind the last token, and the part of the KV pool that one request may fill: near its
# end SGLang retracts or refuses requests, and a round reserves room for its block.
SPARE_POSITIONS = 32
POOL_SHARE = 0.9
# The metrics that the probes read, all labels of each added up.
RUNNING, ROUNDS = "sglang:num_running_reqs", "sglang:spec_verify_calls_total"
GENERATED, REQUESTS = "sglang:generation_tokens_total", "sglang:num_requests_total"
TREE_NODES, TREES = "sglang:ddtree_nodes_sum", "sglang:ddtree_nodes_count"

_SAMPLE = re.compile(r"^([A-Za-z_:][\w:]*)(?:\{.*\})? (\S+)", re.MULTILINE)


@dataclass(frozen=True)
class ServerFacts:
    """A server that answers, as /server_info describes it."""

    url: str
    info: Mapping[str, Any]

    @property
    def algorithm(self) -> str | None:
        return self.info.get("speculative_algorithm")

    @property
    def width(self) -> int | None:
        """Rows of a verify, root included."""
        return self.info.get("speculative_num_draft_tokens")

    @property
    def backend(self) -> str | None:
        return self.info.get("decode_attention_backend") or self.info.get("attention_backend")

    @property
    def takes_text(self) -> bool:
        return not self.info.get("skip_tokenizer_init")

    @property
    def attention_gpus(self) -> int:
        """GPUs that share one request's KV heads."""
        parts = self.info.get("dp_size") if self.info.get("enable_dp_attention") else 1
        return max(1, (self.info.get("tp_size") or 1) // (parts or 1))

    @property
    def gpus(self) -> int:
        return self.info.get("tp_size") or 1

    def longest_prompt(self, model_length: int | None, new_tokens: int) -> int | None:
        """Tokens that a prompt may have with `new_tokens` behind it; None where no limit is known."""
        pool = self.info.get("max_total_num_tokens")
        limits = [
            self.info.get("context_length"),
            model_length,
            int(pool * POOL_SHARE) if pool else None,
            self.info.get("max_req_input_len"),
        ]
        known = [limit for limit in limits if limit]
        return min(known) - new_tokens - SPARE_POSITIONS if known else None

    def summary(self) -> str:
        parts = [
            f"SGLang {self.info.get('version', 'of unknown version')}",
            f"{self.algorithm}, {self.width} rows a verify" if self.algorithm else "no speculation",
            f"backend {self.backend}",
            f"page size {self.info.get('page_size')}",
        ]
        return f"{self.url}: {', '.join(parts)}; {self.info['model_path']}"

    def header(self) -> dict[str, Any]:
        """What a results file says of the server."""
        names = ("version", "model_path", "speculative_draft_model_path", "page_size", "tp_size", "dtype")
        return {
            "url": self.url,
            "algorithm": self.algorithm,
            "width": self.width,
            "backend": self.backend,
            **{name: self.info.get(name) for name in (*names, "kv_cache_dtype")},
        }


def read_facts(client: SGLangClient) -> ServerFacts:
    """Ask the server who it is.

    Raises:
        ServerLost: it does not answer, is no SGLang server, or generates no text.
    """
    info = _read_info(client)
    if "model_path" not in info:
        raise ServerLost(f"what answers at {client.url} is no SGLang server")
    if info.get("is_embedding"):
        raise ServerLost(f"{client.url} serves embeddings: there is no decoding to probe")
    return ServerFacts(client.url, info)


def _read_info(client: SGLangClient) -> dict[str, Any]:
    for path in INFO_PATHS:
        try:
            return read_json(client, path)
        except ServerLost as error:
            if error.code in (401, 403):
                raise ServerLost(f"{client.url} wants an API key: set DDTREE_API_KEY") from error
            if error.code == 503:
                raise ServerLost(f"{client.url} is not ready yet (HTTP 503): try again later") from error
            if error.code != 404:
                raise
    raise ServerLost(f"what answers at {client.url} is no SGLang server: it has no {' or '.join(INFO_PATHS)}")


def read_model_length(client: SGLangClient) -> int | None:
    """Positions that the model has, where the server says so."""
    try:
        models = read_json(client, "/v1/models")["data"]
        return models[0].get("max_model_len")
    except (ServerLost, LookupError, TypeError):
        return None


def read_metrics(client: SGLangClient) -> dict[str, float] | None:
    """Prometheus samples by name, their labels added up; None where /metrics is not enabled."""
    try:
        text = read_text(client, "/metrics")
    except ServerLost as error:
        if error.code is None:
            raise
        return None
    return parse_metrics(text)


def parse_metrics(text: str) -> dict[str, float] | None:
    """None for text that holds no metrics of SGLang."""
    totals: dict[str, float] = {}
    for name, value in _SAMPLE.findall(text):
        if name.startswith("sglang:"):
            totals[name] = totals.get(name, 0.0) + float(value)
    return totals or None


def traffic(metrics: Mapping[str, float] | None) -> dict[str, float] | None:
    """What the server's own requests were committed since it started: rounds, mean commit length.

    None without metrics or without a round.
    """
    if metrics is None or not metrics.get(ROUNDS):
        return None
    # The first token of each request is its prefill's.
    behind_first = metrics.get(GENERATED, 0.0) - metrics.get(REQUESTS, 0.0)
    return {
        "rounds": int(metrics[ROUNDS]),
        "mean_commit_length": round(behind_first / metrics[ROUNDS], 3),
    }
