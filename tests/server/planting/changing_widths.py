"""A test plugin that gives each round another width, whatever the last one taught.

    DDTREE_TEST_WIDTHS   set: hook the policy (which SGLANG_DDTREE_WIDTHS=auto asks)
"""

from __future__ import annotations

import os
import random


def load() -> None:
    if not os.environ.get("DDTREE_TEST_WIDTHS"):
        return
    from sglang_ddtree_patch.widths.policy import WidthPolicy

    draws, last = random.Random(3), [0]

    def choose(policy, batch, context):
        last[0] = draws.choice([width for width in policy.widths if width != last[0]])
        return last[0]

    WidthPolicy.choose = choose
