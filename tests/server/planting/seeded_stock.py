"""A test plugin that makes any server draw by its requests' seeds, stock SGLang's included.

Stock does so under --enable-deterministic-inference, which asks for attention kernels that a CPU lacks. Here
the batches are described as under that flag, and nothing else of it applies. Requests without a seed get 42,
as there. Greedy requests are not touched.

    DDTREE_TEST_SEEDS   set: hook the description of batches
"""

import os


def load() -> None:
    if not os.environ.get("DDTREE_TEST_SEEDS"):
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(
        "sglang.srt.sampling.sampling_batch_info.SamplingBatchInfo.from_schedule_batch",
        describe_with_seeds,
        HookType.AROUND,
    )


def describe_with_seeds(original, *arguments, **options):
    from sglang.srt.runtime_context import get_exec

    with get_exec().deterministic.override(enable_deterministic_inference=True):
        return original(*arguments, **options)
