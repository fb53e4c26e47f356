"""What /metrics shows is what the answers say: SGLang's speculative metrics and ours, every round of them."""

from __future__ import annotations

import re
import urllib.request
from collections import Counter
from collections.abc import Iterator

import pytest
from serving import ENVIRONMENT, Request, ask_all, ddtree_flags, text_tokens, used_tokens

from sglang_ddtree_patch.launch.server_process import ServerProcess
from sglang_ddtree_patch.launch.server_template import ServerTemplate
from sglang_ddtree_patch.metrics.round_times import PARTS

MODEL = "tiny-gqa"
WIDTH = 12


@pytest.fixture(scope="module", params=["overlap", "synchronous"])
def server(request: pytest.FixtureRequest, template: ServerTemplate) -> Iterator[ServerProcess]:
    # SGLang's gauges then show the last round alone.
    more = ["--enable-metrics", "--decode-log-interval", "1"]
    if request.param == "synchronous":
        more.append("--disable-overlap-schedule")
    flags = ddtree_flags(MODEL, 16, WIDTH, *more)
    with ServerProcess(flags, environment=ENVIRONMENT, launcher=template.launch, grace=0) as started:
        yield started


class Metrics:
    """The values on a /metrics page, by name and the labels asked for."""

    def __init__(self, server: ServerProcess):
        # A round of the last answer may still be under way.
        assert used_tokens(server) == 0
        with urllib.request.urlopen(f"{server.url}/metrics", timeout=60) as page:
            lines = page.read().decode().splitlines()
        self._values = [
            (name, dict(re.findall(r'(\w+)="([^"]*)"', labels)), float(value))
            for line in lines
            for name, labels, value in re.findall(r"^(sglang:\w+)\{(.*)\} (\S+)$", line)
        ]

    def by_label(self, name: str, label: str) -> dict[str, float]:
        found = {labels[label]: value for known, labels, value in self._values if known == f"sglang:{name}"}
        assert found, f"no sglang:{name} with a label {label}"
        return found

    def __getitem__(self, name: str) -> float:
        (value,) = self.by_label(name, "model_name").values()
        return value

    def buckets(self, name: str) -> Counter[float]:
        """How often each bucket of a histogram was hit, empty ones left out."""
        up_to = {float(bound): count for bound, count in self.by_label(f"{name}_bucket", "le").items()}
        hits, below = Counter(), 0.0
        for bound in sorted(up_to):
            hits[bound] = up_to[bound] - below
            below = up_to[bound]
        return +hits


def test_metrics_are_what_the_answers_say(server: ServerProcess) -> None:
    ask_all(server, requests(2))
    before = Metrics(server)
    answers = ask_all(server, requests(6)).values()
    after = Metrics(server)

    rounds = sum(answer.meta["spec_verify_ct"] for answer in answers)
    accepted = sum(answer.meta["spec_num_correct_drafts"] for answer in answers)
    lengths: Counter[float] = Counter()
    for answer in answers:
        lengths.update({i: n for i, n in enumerate(answer.meta["spec_correct_drafts_histogram"]) if n})
    assert accepted > rounds, "the drafter guesses nothing, so lengths prove little"

    def grown(name: str) -> float:
        return after[name] - before[name]

    assert after.buckets("ddtree_accept_length") - before.buckets("ddtree_accept_length") == lengths
    assert grown("ddtree_accept_length_sum") == accepted
    assert grown("ddtree_accept_length_count") == rounds
    # A tree of eight candidates a position always fills its rows.
    assert after.buckets("ddtree_nodes") - before.buckets("ddtree_nodes") == {16.0: rounds}
    assert grown("ddtree_nodes_sum") == rounds * WIDTH

    assert set(after.by_label("ddtree_rounds_total", "width")) == {str(WIDTH)}
    run = grown("ddtree_rounds_total")
    assert max(answer.meta["spec_verify_ct"] for answer in answers) <= run < rounds + len(answers) + 1
    assert grown("ddtree_round_seconds_count") == run
    parts = after.by_label("ddtree_part_seconds_sum", "part")
    assert set(parts) == set(PARTS)
    assert all(seconds > 0 for seconds in parts.values())
    assert sum(parts.values()) == pytest.approx(after["ddtree_round_seconds_sum"])
    assert parts["verify"] > parts["tree"], "the target's forward is the larger part"


def test_sglangs_own_gauges_show_the_last_round(server: ServerProcess) -> None:
    if "--disable-overlap-schedule" not in server.arguments:
        return  # an ended request takes part in one more round, and no answer tells of that
    for request in requests(3):
        payload = {**request.payload, "stream": True}
        events = [event["meta_info"] for event in server.stream_json("/generate", payload)]
        metrics = Metrics(server)
        # The prefill's token comes first, then what each round commits, the last one perhaps cut short.
        tokens = [event["completion_tokens"] for event in events]
        meta = events[-1]
        rounds, accepted = meta["spec_verify_ct"], meta["spec_num_correct_drafts"]
        assert len(tokens) == 1 + rounds
        last = accepted - (tokens[-2] - 1 - (rounds - 1))
        assert metrics["spec_accept_length"] == last + 1
        assert metrics["spec_accept_rate"] == pytest.approx(last / (WIDTH - 1))
        assert metrics["spec_num_draft_tokens"] == WIDTH
        assert meta["spec_accept_rate"] == pytest.approx(accepted / rounds / (WIDTH - 1))
        assert meta["spec_accept_length"] == pytest.approx(meta["completion_tokens"] / rounds)


def requests(count: int) -> list[Request]:
    return [
        Request(f"prompt {i}", text_tokens(MODEL, 50, start=90 * i), 20 + 3 * i, {"ignore_eos": True})
        for i in range(count)
    ]
