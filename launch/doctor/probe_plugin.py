"""Probe of `ddtree doctor`: load plugins as every SGLang process does, and look whether ours registered.

SGLang logs what a plugin raises and goes on, so the registry is asked, not the exit code.
"""

from __future__ import annotations

import os

from sglang_ddtree_patch.launch.doctor.probe import report
from sglang_ddtree_patch.launch.server_process import CPU_ENVIRONMENT
from sglang_ddtree_patch.launch.sglang_install import has_accelerator
from sglang_ddtree_patch.settings import BACKEND


def main() -> None:
    if "SGLANG_PLATFORM" not in os.environ and not has_accelerator():
        # What `ddtree serve` sets; read when SGLang is imported.
        os.environ.update(CPU_ENVIRONMENT)

    from sglang.srt.plugins import load_plugins

    load_plugins()

    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS

    report("registered", BACKEND in ATTENTION_BACKENDS)


if __name__ == "__main__":
    main()
