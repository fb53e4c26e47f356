"""`ddtree doctor` as a user runs it: the real kernels, and SGLang itself loading the plugin."""

import json
import os
import subprocess
import sys

from sglang_ddtree_patch import model_catalog


def test_this_machine_would_serve():
    """Without the interpreter asked for, as in a user's shell: the probe has to ask for it in time."""
    model = model_catalog.entry("tiny-mla")
    environment = {k: v for k, v in os.environ.items() if k not in ("TRITON_INTERPRET", "SGLANG_PLATFORM")}
    command = [
        sys.executable, "-m", "sglang_ddtree_patch.cli", "doctor", "--json", "--model-path", model.target,
        "--speculative-draft-model-path", model.draft,
    ]  # fmt: skip
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert result.returncode == 0, result.stdout + result.stderr
    checks = {check["name"]: check for check in json.loads(result.stdout)["checks"]}
    for name in ("kernel reference", "kernel triton", "contract", "plugin found", "plugin loads"):
        assert checks[name]["status"] == "ok", checks[name]
