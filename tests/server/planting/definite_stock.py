"""A test plugin that makes stock SGLang's answers definite where they are not, so that it can be an oracle.

Seeds: stock draws by them under --enable-deterministic-inference, which asks for attention kernels that a CPU
lacks. Here the batches are described as under that flag, and nothing else of it applies. Requests without a
seed get 42, as there; greedy requests are not touched.

Penalties: the synchronous scheduler applies them in the order of a Python set, which is another one in every
process, though adding and scaling do not commute. Here it adds first, as the overlap scheduler always does.

    DDTREE_TEST_ORACLE   set: hook both
"""

import os


def load() -> None:
    if not os.environ.get("DDTREE_TEST_ORACLE"):
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    for target, hook in (
        ("sampling_batch_info.SamplingBatchInfo.from_schedule_batch", describe_with_seeds),
        ("penaltylib.orchestrator.BatchedPenalizerOrchestrator.__init__", add_before_scaling),
    ):
        HookRegistry.register(f"sglang.srt.sampling.{target}", hook, HookType.AROUND)


def describe_with_seeds(original, *arguments, **options):
    from sglang.srt.runtime_context import get_exec

    with get_exec().deterministic.override(enable_deterministic_inference=True):
        return original(*arguments, **options)


def add_before_scaling(original, orchestrator, *arguments, penalizers, **options):
    ordered = sorted(penalizers, key=lambda penalizer: penalizer.is_multiplicative)
    original(orchestrator, *arguments, penalizers=ordered, **options)
