"""A test plugin that lets a CPU server take every kernel of a round, through Triton's interpreter.

    DDTREE_TEST_KERNELS  set: whatever asks whether the device has kernels is told that it does
"""

from __future__ import annotations

import os


def load() -> None:
    """Answer for the GPU in this process; nothing without DDTREE_TEST_KERNELS."""
    if not os.environ.get("DDTREE_TEST_KERNELS"):
        return
    from sglang_ddtree_patch.attention import kernel_choice as attention_kernel
    from sglang_ddtree_patch.kernels import slots
    from sglang_ddtree_patch.kernels.accept import walk as accept
    from sglang_ddtree_patch.kernels.tree import build as tree
    from sglang_ddtree_patch.kernels.tree import candidates
    from sglang_ddtree_patch.round import commit, draft_step

    for module in (attention_kernel, commit, draft_step, accept, candidates, slots, tree):
        module.has_kernels = lambda device: True
