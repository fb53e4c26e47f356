"""`ddtree probe`: is a running SGLang server healthy? Over HTTP, this machine's or another's, ours or stock.

ddtree probe commit    is the drafter right, and at every context length?
ddtree probe gpu       is the GPU working, or is a kernel merely resident?
"""

from __future__ import annotations

import argparse

from sglang_ddtree_patch.launch.probe import commit as probe_commit
from sglang_ddtree_patch.launch.probe import gpu as probe_gpu

_EXAMPLE = """\
example:
  ddtree probe commit --url http://localhost:30000
  ddtree probe gpu --url http://localhost:30000 --json gpu.json
"""


def add_parser(subparsers) -> None:
    parser = subparsers.add_parser(
        "probe",
        help="ask a running server whether its drafter is right and its GPU works",
        description="Probe a running SGLang server over HTTP, any algorithm; docs/probes.md says how.",
        epilog=_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    actions = parser.add_subparsers(title="probes", metavar="PROBE", required=True)
    probe_commit.add_parser(actions)
    probe_gpu.add_parser(actions)
