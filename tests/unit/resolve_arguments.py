"""Resolve SGLang command lines as a server does, many of them for the price of one import of SGLang.

Run as a program: a JSON list of cases on stdin, a JSON list of outcomes on stdout. A case is
`{"argv": [...], "environment": {...}, "plugin": bool, "mismatch": bool}`: `plugin` false keeps the plugin
out as SGLANG_PLUGINS does, `mismatch` true makes the contract fail. Every command line resolves in a fork
of its own, so none sees what another left behind.
"""

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import traceback
from dataclasses import dataclass
from pathlib import Path

from sglang_ddtree_patch import plugin
from sglang_ddtree_patch.contract import CONTRACT
from sglang_ddtree_patch.contract_check import ContractReport, Mismatch


@dataclass(frozen=True)
class Outcome:
    """What became of one command line: fields by name (as repr), or the error; and the log."""

    fields: dict[str, str] | None
    error: str | None
    error_type: str | None
    log: str


def resolve(cases: list[dict], environment: dict[str, str]) -> list[Outcome]:
    """Resolve the cases in a process with `environment` on top of this one's."""
    result = subprocess.run(
        [sys.executable, "-W", "ignore", __file__],
        input=json.dumps(cases),
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    return [Outcome(**outcome) for outcome in json.loads(result.stdout.splitlines()[-1])]


def main() -> None:
    cases = json.load(sys.stdin)
    # What a launcher imports before it loads plugins, and what they and resolution import on their way.
    import sglang.srt.arg_groups.pipeline
    import sglang.srt.model_executor.model_runner
    import sglang.srt.server_args  # noqa: F401

    plugin.check_installed_sglang()  # remembered, so that no fork checks again
    print(json.dumps([resolve_in_a_fork(case) for case in cases]))


def resolve_in_a_fork(case: dict) -> dict:
    with tempfile.TemporaryDirectory() as folder:
        outcome, log = Path(folder, "outcome"), Path(folder, "log")
        child = os.fork()
        if child == 0:
            with open(log, "w") as stream:
                os.dup2(stream.fileno(), 1)
                os.dup2(stream.fileno(), 2)
            outcome.write_text(json.dumps(resolve_here(case)))
            with contextlib.suppress(OSError):
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(0)
        _, status = os.waitpid(child, 0)
        assert status == 0, log.read_text()
        return {**json.loads(outcome.read_text()), "log": log.read_text()}


def resolve_here(case: dict) -> dict:
    os.environ.update(case.get("environment", {}))
    if not case.get("plugin", True):
        os.environ["SGLANG_PLUGINS"] = "ddtree_cpu"
    if case.get("mismatch"):
        plugin.check_installed_sglang = lambda: ContractReport("9.9.9", (Mismatch(CONTRACT[0], "nothing"),))
    from sglang.srt.arg_groups.arg_utils import record_fields
    from sglang.srt.arg_groups.overrides import resolved_view
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import prepare_server_args

    load_plugins()
    try:
        server_args = prepare_server_args(case["argv"])
        server_args.resolve_once()
    except (Exception, SystemExit) as error:  # noqa: BLE001
        traceback.print_exc()
        return {"fields": None, "error": str(error), "error_type": type(error).__name__}
    cfg = resolved_view(server_args)
    fields = {field.name: repr(getattr(cfg, field.name)) for field in record_fields(type(server_args))}
    return {"fields": fields, "error": None, "error_type": None}


if __name__ == "__main__":
    main()
