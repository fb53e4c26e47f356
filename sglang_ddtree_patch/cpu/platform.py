"""An SGLang platform that serves on any CPU with the stock wheel, for tests and for trying things out.

SGLang's own CPU engine needs a build of its kernel package with AMX or Arm code. This platform asks for
none of that: fused operators run their plain PyTorch form and Triton kernels run in Triton's interpreter.
It is slow and exact, which is what comparing token ids in float32 wants.

It acts only when `SGLANG_PLATFORM=ddtree_cpu` says so. SGLang calls `activate` on every machine the
package is installed on, and a platform that answered unasked would take over AMD, NPU and Mac servers.
"""

import os

from sglang.srt.environ import envs
from sglang.srt.platforms.cpu import CpuDeviceMixin
from sglang.srt.platforms.device_mixin import PlatformEnum
from sglang.srt.platforms.interface import KVPoolKind, PlatformCapabilities, SRTPlatform

from sglang_ddtree_patch.cpu.hooks import register_cpu_hooks

PLATFORM_NAME = "ddtree_cpu"

# Speculative algorithms this platform has been seen to serve. DFLASH is the chain that DDTREE's rounds
# are compared with.
SPECULATIVE_ALGORITHMS = frozenset({"DDTREE", "DFLASH"})
# Backends that can verify a block on the CPU; stock torch_native cannot.
DRAFT_ATTENTION_BACKENDS = ("ddtree-verify", "triton")


def activate() -> str | None:
    """Return the platform's class path if this process was asked to use it, else None.

    Triton decides between compiling and interpreting when it is imported, and torch likewise, which has
    happened in the process that sets the variables here, but not in the ones it spawns to run the model.
    """
    if envs.SGLANG_PLATFORM.get() != PLATFORM_NAME:
        return None
    os.environ.setdefault("TRITON_INTERPRET", "1")
    # Compiling the few functions that SGLang compiles takes a C++ compiler and half a minute.
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
    register_cpu_hooks()
    return f"{__name__}:DDTreeCpuPlatform"


class DDTreeCpuPlatform(CpuDeviceMixin, SRTPlatform):
    """The CPU seen as an out-of-tree device, so that SGLang takes none of its AMX-only branches."""

    _enum = PlatformEnum.OOT
    # supports_triton stays False though the interpreter is there: SGLang then picks its torch writers
    # and allocators, which are far quicker than interpreted kernels.
    capabilities = PlatformCapabilities(supports_triton=False, graph_capture=False)

    def apply_server_args_defaults(self, server_args) -> None:
        """Take back the AMX backend that SGLang puts in for `--device cpu`, so that it asks for a default."""
        if server_args.attention_backend == "intel_amx":
            server_args.attention_backend = None

    def get_dispatch_key_name(self) -> str:
        return "native"

    def get_kv_pool_cls(self, *, kind: KVPoolKind) -> type | None:
        """The multi-head pool without its Triton row copy; the MLA pool moves rows with torch already."""
        if kind != "mha":
            return None
        from sglang_ddtree_patch.cpu.kv_pool import CpuMHATokenToKVPool

        return CpuMHATokenToKVPool

    def supports_speculative_algorithm(self, algorithm: str) -> bool:
        return algorithm in SPECULATIVE_ALGORITHMS

    def supports_speculative_draft_attention_backend(self, algorithm: str, backend: str) -> bool:
        return algorithm in SPECULATIVE_ALGORITHMS and backend in DRAFT_ATTENTION_BACKENDS

    def get_default_speculative_draft_attention_backend(self, algorithm: str) -> str:
        return DRAFT_ATTENTION_BACKENDS[0]

    def get_speculative_cache_locs_fn(self):
        from sglang_ddtree_patch.cpu.kv_pool import gather_cache_locs

        return gather_cache_locs
