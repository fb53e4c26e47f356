"""`ddtree demo`: the same prompts through DDTREE and through stock SGLang, and a look at both.

Two real servers, one after the other: SGLang with DDTREE, its pages and tree as `ddtree serve` would choose
them, whose rounds are shown as they stream in, then stock SGLang without this plugin and without speculation.
Both run in float32, where equal means equal: the command fails if any text differs.
"""

import argparse
import contextlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from sglang_ddtree_patch.errors import ConfigurationError
from sglang_ddtree_patch.launch import demo_models
from sglang_ddtree_patch.launch.demo_models import DemoModel, demo_model
from sglang_ddtree_patch.launch.demo_view import Comparison, DemoView
from sglang_ddtree_patch.launch.doctor.models import read_config
from sglang_ddtree_patch.launch.run_folder import exit_on_signals, run_folder
from sglang_ddtree_patch.launch.serve_defaults import PAGE_SIZE, choose_width
from sglang_ddtree_patch.launch.server_process import (
    CPU_ENVIRONMENT,
    Launcher,
    ServerProcess,
    ServerStartError,
    launch_python,
)
from sglang_ddtree_patch.launch.server_template import ServerTemplate
from sglang_ddtree_patch.launch.sglang_client import Budget, NotMeasured, ServerLost, stream_answer
from sglang_ddtree_patch.launch.sglang_install import has_accelerator, require_sglang
from sglang_ddtree_patch.settings import ALGORITHM, BACKEND

MAX_NEW_TOKENS = 96
# Keeps any plugin, this one included, out of the server that the text is compared with.
STOCK_ENVIRONMENT = {"SGLANG_PLUGINS": "none"}

_EXAMPLE = """\
example:
  ddtree demo
  ddtree demo --model tiny-mla --max-new-tokens 32
  ddtree demo --prompt "Write the function open(self)."
"""


@dataclass(frozen=True)
class Completion:
    """One prompt's output, from either server."""

    text: str
    output_ids: list[int]
    forwards: int  # target forwards, the prompt's own included


def add_parser(subparsers) -> None:
    parser = subparsers.add_parser(
        "demo",
        help="serve a small model with and without DDTREE and compare",
        description="Stream answers through a real SGLang server with DDTREE, each round's accepted "
        "tokens marked, then check that stock SGLang gives the same text. Page size and tree width are those "
        "of ddtree serve.",
        epilog=_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--model",
        choices=demo_models.names(),
        help="(default: smollm2 where it is listed and there is a GPU, else tiny-gqa)",
    )
    parser.add_argument("--prompt", action="append", help="ask this instead; may be repeated")
    parser.add_argument(
        "--max-new-tokens", type=int, default=MAX_NEW_TOKENS, help="tokens a prompt (default: %(default)s)"
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    if arguments.max_new_tokens < 1:
        print("ddtree demo: --max-new-tokens must be at least 1.", file=sys.stderr)
        return 2
    if not require_sglang("demo"):
        return 1
    exit_on_signals()
    view = DemoView()
    try:
        model = demo_model(arguments.model or demo_models.default_name(), view.line)
    except ConfigurationError as error:
        print(f"ddtree demo: {error}", file=sys.stderr)
        return 1
    prompts = arguments.prompt or model.prompts
    with run_folder("demo") as logs:
        try:
            comparisons = compare(model, prompts, arguments.max_new_tokens, view, logs.path)
        except (ServerStartError, ServerLost, NotMeasured) as error:
            logs.keep()
            print(f"\nddtree demo: {error}", file=sys.stderr)
            return 1
        except KeyboardInterrupt:
            view.end_progress()
            raise
        view.table(comparisons)
        different = sum(not one.is_equal for one in comparisons)
        if different:
            logs.keep()
            view.line(
                f"\n{different} of {len(comparisons)} texts differ from plain decoding. Logs: {logs.path}"
            )
            return 1
    view.line(f"\nAll {len(comparisons)} texts are the same, token for token.")
    return 0


def compare(
    model: DemoModel, prompts: Sequence[str], max_new_tokens: int, view: DemoView, logs: Path
) -> list[Comparison]:
    """Serve the prompts with DDTREE, then without, and pair the outputs up."""
    folder, turn = model.folder, model.turn()
    on_cpu = not has_accelerator()
    view.line(
        f"{model.name} on the {'CPU' if on_cpu else 'GPU'}, float32, page size {PAGE_SIZE}. "
        f"Logs, while this runs: {logs}\n"
    )
    width = choose_width(read_config(str(folder / "target")), tp_size=1).value
    with contextlib.ExitStack() as stack:
        launcher = stack.enter_context(ServerTemplate(CPU_ENVIRONMENT)).launch if on_cpu else launch_python
        servers = DemoServers(folder / "target", on_cpu, logs, launcher, view)

        view.line(f"SGLang with {ALGORITHM} and {BACKEND}, {width} rows a verify:")
        tree_flags = (
            "--speculative-algorithm", ALGORITHM,
            "--speculative-draft-model-path", str(folder / "draft"),
            "--speculative-num-draft-tokens", width,
        )  # fmt: skip
        with servers.start("ddtree", tree_flags, {}) as server:
            with_trees = [complete(server, prompt, turn(prompt), max_new_tokens, view) for prompt in prompts]

        view.line("Stock SGLang, no plugin, no speculation:")
        with servers.start("stock", (), STOCK_ENVIRONMENT) as server:
            plain = [complete(server, prompt, turn(prompt), max_new_tokens, None) for prompt in prompts]

    return [
        Comparison(
            prompt=prompt,
            tokens=len(tree.output_ids),
            plain_forwards=reference.forwards,
            tree_forwards=tree.forwards,
            is_equal=tree.output_ids == reference.output_ids and tree.text == reference.text,
        )
        for prompt, tree, reference in zip(prompts, with_trees, plain, strict=True)
    ]


@dataclass(frozen=True)
class DemoServers:
    """What the demo's two servers share."""

    target: Path
    on_cpu: bool
    logs: Path
    launcher: Launcher
    view: DemoView

    @contextlib.contextmanager
    def start(
        self, name: str, flags: Sequence[str], environment: Mapping[str, str]
    ) -> Iterator[ServerProcess]:
        """A ready server with these flags on top of the shared ones, its start shown in the view."""
        device_flags: tuple[str, ...]
        if self.on_cpu:
            device_flags = ("--device", "cpu")
            environment = {**environment, **CPU_ENVIRONMENT}
        else:
            # The stock backend that computes in float32 on every GPU.
            device_flags = ("--attention-backend", "triton", "--mem-fraction-static", "0.3")
        server = ServerProcess(
            [
                "--model-path", str(self.target),
                "--dtype", "float32",
                "--page-size", str(PAGE_SIZE),
                "--max-running-requests", "8",
                *device_flags,
                *flags,
            ],
            environment=environment,
            log_path=self.logs / f"{name}.log",
            progress=self.view.progress,
            launcher=self.launcher,
        )  # fmt: skip
        with server:
            self.view.end_progress()
            self.view.line(
                f"ready after {server.ready_seconds:.0f} s; OpenAI API at {server.url}/v1 while this runs\n"
            )
            yield server


def complete(
    server: ServerProcess, prompt: str, rendered: str, max_new_tokens: int, view: DemoView | None
) -> Completion:
    """Greedy answer to one prompt, streamed; every event carries what one round committed."""
    if view:
        view.start_text(f"> {prompt}\n")
    text, event = "", {}
    payload = {
        "text": rendered,
        "sampling_params": {"temperature": 0, "max_new_tokens": max_new_tokens},
    }
    for event in stream_answer(server, payload, Budget()):
        if view and len(event["text"]) > len(text):
            view.round(event["text"][len(text) :])
        text = event["text"]
    if view:
        view.end_text()
    meta = event["meta_info"]
    # Without speculation every token after the first is a forward, and the first is the prompt's.
    rounds = meta.get("spec_verify_ct", meta["completion_tokens"] - 1)
    return Completion(text=text, output_ids=event["output_ids"], forwards=1 + rounds)
