"""`ddtree probe commit`: what a server commits a round, of predictable text and of prose, by context length.

A sentence said over and over is guessed by any drafter that works, at any length. Prose shows what is left of
that where text is not so easily guessed. Counts are the server's own: `spec_verify_ct`,
`spec_num_correct_drafts` and `spec_num_proposed_drafts` in each answer's meta_info; nodes are counted by this
package's servers with --enable-metrics, and otherwise taken to be the width.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Sequence
from typing import Any

from sglang_ddtree_patch.errors import ConfigurationError
from sglang_ddtree_patch.launch.bench.record import Record
from sglang_ddtree_patch.launch.probe import run as probe_run
from sglang_ddtree_patch.launch.probe.answer import Answer, ask
from sglang_ddtree_patch.launch.probe.server import (
    RUNNING,
    TREE_NODES,
    TREES,
    ServerFacts,
    read_metrics,
    traffic,
)
from sglang_ddtree_patch.launch.probe.text import KINDS, PREDICTABLE, PROSE, TextMaker, repeated_part
from sglang_ddtree_patch.launch.probe.verdict import Pair, judge, overall
from sglang_ddtree_patch.launch.sglang_client import NotMeasured, ServerLost, SGLangClient
from sglang_ddtree_patch.launch.terminal import LiveLine

COLUMNS = (
    "text", "context", "prompt_tokens", "cached_tokens", "generated", "wall_seconds", "first_token_seconds",
    "rounds", "mean_commit_length", "mean_accepted_depth", "drafted", "nodes", "repeated",
)  # fmt: skip
HEADINGS = (
    "text", "prompt", "generated", "wall s", "first s", "rounds", "commit", "depth", "drafted", "nodes",
    "repeated",
)  # fmt: skip
COUNTED = ("spec_verify_ct", "spec_num_correct_drafts", "spec_num_proposed_drafts")
FEWEST_TOKENS = 16
TELLING_ROUNDS = 100  # fewer say nothing of a server's traffic
_LINE = "{:<12}{:>9}{:>11}{:>9}{:>9}{:>8}{:>8}{:>8}{:>9}{:>7}{:>10}".format

_EXAMPLE = """\
example:
  ddtree probe commit
  ddtree probe commit --url http://gpu-box:30000 --contexts 1024 32768 --json commit.json

DDTREE_API_KEY in the environment is sent as the server's API key.
"""


def add_parser(subparsers) -> None:
    parser = subparsers.add_parser(
        "commit",
        help="tokens committed a round against context length, on predictable text and on prose",
        description="Ask a running server for predictable text and for prose at growing context and say "
        "whether its drafter holds.",
        epilog=_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    probe_run.add_common_options(parser)
    parser.add_argument("--new-tokens", type=int, default=128, help="tokens an answer (default: %(default)s)")
    parser.set_defaults(
        run=lambda arguments: probe_run.run("commit", arguments, lambda *found: probe(arguments, *found))
    )


def probe(arguments: argparse.Namespace, client: SGLangClient, facts: ServerFacts, view: LiveLine) -> int:
    if arguments.new_tokens < FEWEST_TOKENS:
        raise ConfigurationError(f"--new-tokens must be at least {FEWEST_TOKENS}.")
    if facts.algorithm is None:
        raise ServerLost(f"{facts.url} decodes without speculation: it drafts nothing to be committed")
    if not facts.takes_text:
        raise ServerLost(f"{facts.url} has no tokenizer (--skip-tokenizer-init): it takes no text to predict")
    contexts = probe_run.choose_contexts(arguments.contexts, facts, client, arguments.new_tokens)
    settings = {"new_tokens": arguments.new_tokens, "contexts": contexts}
    record = probe_run.begin_record(arguments.json, "commit", facts, settings, COLUMNS)
    view.line(facts.summary())
    metrics = read_metrics(client)
    record.header["traffic"] = traffic(metrics)
    for line in notes(metrics, contexts, arguments.contexts):
        view.line(line)
    view.line("\n" + _LINE(*HEADINGS))
    answers = 2 * len(contexts)
    return probe_run.finish(
        "commit",
        record,
        answers,
        view.line,
        lambda: measure(client, record, contexts, arguments.new_tokens, metrics is not None, view),
    )


def notes(
    metrics: dict[str, float] | None, contexts: Sequence[int], asked: Sequence[int] | None
) -> list[str]:
    """What to know before reading the figures."""
    lines = []
    if asked and max(asked) > contexts[-1]:
        lines.append(f"The server takes prompts of {contexts[-1]} tokens here: longer ones are cut to that.")
    elif not asked and contexts[-1] < probe_run.CONTEXTS[0]:
        lines.append(f"Its context is short: one length, {contexts[-1]} tokens, says nothing of longer ones.")
    if metrics is None:
        return [*lines, "It has no /metrics (--enable-metrics): other traffic is not seen."]
    if metrics.get(RUNNING):
        lines.append(f"{metrics[RUNNING]:.0f} other requests are running: times are shared with them.")
    since = traffic(metrics)
    if since is not None and since["rounds"] >= TELLING_ROUNDS:
        lines.append(
            f"Its own traffic so far: {since['mean_commit_length']:.2f} tokens committed a round, "
            f"over {since['rounds']} rounds."
        )
    return lines


def measure(
    client: SGLangClient,
    record: Record,
    contexts: Sequence[int],
    new_tokens: int,
    has_metrics: bool,
    view: LiveLine,
) -> None:
    """Fill the record, shortest context first, with a verdict after each."""
    makers = {kind: TextMaker(kind) for kind in KINDS}
    for maker in makers.values():
        maker.learn_length(client, contexts[0])
    for context in contexts:
        for kind, maker in makers.items():
            before = read_metrics(client) if has_metrics else None
            text = maker.make(context)
            try:
                answer = ask(
                    client, text, new_tokens, functools.partial(show_progress, view, kind, new_tokens)
                )
            except NotMeasured as error:
                view.end_progress()
                view.line(f"{kind:<12}{context:>9} not measured: {error}")
                continue
            maker.learn(text, answer.meta["prompt_tokens"])
            after = read_metrics(client) if has_metrics else None
            row = {"text": kind, "context": context, **count(answer, tree_nodes(before, after))}
            row["repeated"] = round(repeated_part(answer.text), 3) if kind == PREDICTABLE else None
            record.add(row)
            view.end_progress()
            view.line(shown(row))
        add_verdicts(record, view)


def show_progress(view: LiveLine, kind: str, new_tokens: int, answer: Answer) -> None:
    view.progress(
        f"{kind:<12}{answer.meta['prompt_tokens']:>9} {answer.progress.tokens[-1]} of {new_tokens} tokens, "
        f"{answer.wall_seconds:.1f} s"
    )


def count(answer: Answer, nodes: float | None) -> dict[str, Any]:
    """The columns that an answer gives; without a count of nodes, they are the rows of the verify.

    Raises:
        ServerLost: it does not say how it was drafted.
    """
    missing = [name for name in COUNTED if name not in answer.meta]
    if missing:
        raise ServerLost(f"the server's answers do not count what they drafted: no {missing[0]} in meta_info")
    rounds, accepted, drafted = (answer.meta[name] for name in COUNTED)
    generated = answer.meta["completion_tokens"]
    return {
        "prompt_tokens": answer.meta["prompt_tokens"],
        "cached_tokens": answer.meta.get("cached_tokens"),
        "generated": generated,
        "wall_seconds": round(answer.wall_seconds, 3),
        "first_token_seconds": round(answer.first_token_seconds, 3),
        "rounds": rounds,
        # The first token is the prefill's.
        "mean_commit_length": round((generated - 1) / rounds, 3),
        "mean_accepted_depth": round(accepted / rounds, 3),
        "drafted": drafted,
        "nodes": round(drafted / rounds + 1 if nodes is None else nodes, 2),
    }


def tree_nodes(before: dict[str, float] | None, after: dict[str, float] | None) -> float | None:
    """Nodes of a verify between two readings of the metrics; None where the server does not count them."""
    if before is None or after is None:
        return None
    trees = after.get(TREES, 0) - before.get(TREES, 0)
    return (after[TREE_NODES] - before.get(TREE_NODES, 0)) / trees if trees else None


def add_verdicts(record: Record, view: LiveLine) -> None:
    """Judge all contexts so far; only the last one's verdict is new."""
    verdicts = judge(pairs(record.rows))
    if not verdicts:
        return
    record.header["verdicts"] = [vars(verdict) for verdict in verdicts]
    record.header["verdict"] = overall(verdicts)
    record.write()
    view.line(f"  {verdicts[-1]}")


def pairs(rows: Sequence[dict[str, Any]]) -> list[Pair]:
    """Contexts at which the predictable text was measured."""
    found = {(row["context"], row["text"]): row for row in rows}
    return [
        Pair(
            context=row["prompt_tokens"],
            predictable=row["mean_accepted_depth"],
            prose=found[context, PROSE]["mean_accepted_depth"] if (context, PROSE) in found else None,
            repeated=row["repeated"],
        )
        for (context, kind), row in found.items()
        if kind == PREDICTABLE
    ]


def shown(row: dict[str, Any]) -> str:
    return _LINE(
        row["text"], row["prompt_tokens"], row["generated"], f"{row['wall_seconds']:.2f}",
        f"{row['first_token_seconds']:.2f}", row["rounds"], f"{row['mean_commit_length']:.2f}",
        f"{row['mean_accepted_depth']:.2f}", row["drafted"], f"{row['nodes']:g}",
        "-" if row["repeated"] is None else f"{row['repeated']:.0%}",
    )  # fmt: skip
