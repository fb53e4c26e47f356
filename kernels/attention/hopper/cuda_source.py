"""CUDA C++ kernels: put together from their files, compiled by NVRTC, kept in Triton's cache.

NVRTC comes with PyTorch's own packages, so no compiler has to be installed. Compiling takes seconds, once a
machine.
"""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Sequence
from pathlib import Path

import torch

HERE = Path(__file__).parent
ARCHITECTURE = "sm_90a"
ELF = b"\x7fELF"  # how machine code begins
NARROW_FILES = ("mla_narrow_ring.cuh", "mla_narrow_keys.cuh", "mla_narrow.cu")


def product(name: str, columns: int, half_type: str, *, across: bool) -> str:
    """A function that adds a product of 64 rows, 16 deep, to its first argument, or starts it anew.

    Args:
        name: of the function.
        columns: of the product, a multiple of 8.
        half_type: bf16 or f16.
        across: the left matrix is summed over its rows in shared memory, not along them.
    """
    count = columns // 2
    registers = ", ".join(f"%{i}" for i in range(count))
    operands = ", ".join(f'"+f"(sums[{i}])' for i in range(count))
    instruction = f"wgmma.mma_async.sync.aligned.m64n{columns}k16.f32.{half_type}.{half_type}"
    return f"""
DEVICE void {name}(float (&sums)[{count}], u64 left, u64 right, bool accumulate) {{
    asm volatile(
        "{{\\n.reg .pred accumulate;\\nsetp.ne.b32 accumulate, %{count + 2}, 0;\\n"
        "{instruction} {{{registers}}}, "
        "%{count}, %{count + 1}, accumulate, 1, 1, {int(across)}, 0;\\n}}\\n"
        : {operands}
        : "l"(left), "l"(right), "r"(static_cast<u32>(accumulate)));
}}
"""


def narrow_source(columns: int, pieces: int, half_type: str, keys_ahead: int = 0) -> str:
    """The whole source of `mla_narrow.cu` for so many columns, pieces of a block and a number type."""
    return "\n".join(
        [
            f"#define COLUMNS {columns}\n#define PIECES {pieces}\n#define KEYS_AHEAD {keys_ahead}",
            f'#define HALF_TYPE "{half_type}"',
            "#define INFINITY __int_as_float(0x7f800000)",
            (HERE / "instructions.cuh").read_text(),
            product("multiply_keys", columns, half_type, across=False),
            product("multiply_values", columns, half_type, across=True),
            *((HERE / name).read_text() for name in NARROW_FILES),
        ]
    )


class CompileError(RuntimeError):
    """NVRTC refused a kernel."""


def compile_source(source: str, options: Sequence[str] = ()) -> tuple[bytes, str]:
    """Machine code for Hopper, and what compiler and assembler said of it. Needs no GPU.

    Raises:
        CompileError: the source is wrong, or NVRTC is missing.
    """
    # PyTorch has loaded the library it was built for; by its name alone the same one is found again.
    name = f"libnvrtc.so.{torch.version.cuda.split('.')[0]}"
    try:
        nvrtc = ctypes.CDLL(name)
    except OSError as error:
        raise CompileError(f"PyTorch's compiler for CUDA, {name}, cannot be loaded: {error}") from error
    program = ctypes.c_void_p()
    _check(nvrtc.nvrtcCreateProgram(ctypes.byref(program), source.encode(), b"kernel.cu", 0, None, None))
    flags = [option.encode() for option in (f"--gpu-architecture={ARCHITECTURE}", "--std=c++17", *options)]
    failed = nvrtc.nvrtcCompileProgram(program, len(flags), (ctypes.c_char_p * len(flags))(*flags))
    log = _output(nvrtc, "ProgramLog", program).rstrip(b"\0").decode(errors="replace")
    if failed:
        raise CompileError(log)
    code = _output(nvrtc, "CUBIN", program)
    nvrtc.nvrtcDestroyProgram(ctypes.byref(program))
    return code, log


def _output(nvrtc: ctypes.CDLL, name: str, program: ctypes.c_void_p) -> bytes:
    size = ctypes.c_size_t()
    _check(getattr(nvrtc, f"nvrtcGet{name}Size")(program, ctypes.byref(size)))
    buffer = ctypes.create_string_buffer(size.value)
    _check(getattr(nvrtc, f"nvrtcGet{name}")(program, buffer))
    return buffer.raw


def _check(result: int) -> None:
    if result:
        raise CompileError(f"NVRTC failed with code {result}")


def cached_code(source: str) -> bytes:
    """Machine code of a source, from Triton's cache where it has been compiled before."""
    from triton.runtime.cache import get_cache_manager

    key = f"{ARCHITECTURE} {torch.version.cuda} {source}"
    cache = get_cache_manager(hashlib.sha256(key.encode()).hexdigest())
    name = "kernel.cubin"
    if (path := cache.get_file(name)) is not None:
        code = Path(path).read_bytes()
        if code.startswith(ELF):  # else the file was damaged: it is made anew
            return code
    code, _ = compile_source(source)
    cache.put(code, name)
    return code
