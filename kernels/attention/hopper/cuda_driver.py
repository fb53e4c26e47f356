"""Load compiled kernels and launch them through CUDA's driver interface, on PyTorch's context and stream."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from typing import Any

import torch

_MOST_SHARED_ATTRIBUTE = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
_NUMBER_TYPES = {torch.float16: 6, torch.bfloat16: 9}  # CUtensorMapDataType
_SWIZZLE_128 = 3  # CU_TENSOR_MAP_SWIZZLE_128B
_PROMOTE_128 = 2  # CU_TENSOR_MAP_L2_PROMOTION_L2_128B
_MAP_BYTES, _MAP_ALIGNMENT = 128, 64


class DriverError(RuntimeError):
    """CUDA's driver refused a call."""


@functools.cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def _call(name: str, *arguments: Any) -> None:
    driver = _driver()
    result = getattr(driver, name)(*arguments)
    if result:
        text = ctypes.c_char_p()
        driver.cuGetErrorString(result, ctypes.byref(text))
        raise DriverError(f"{name}: {(text.value or b'unknown error').decode()}")


class TensorMap:
    """How a tensor load finds a box in a matrix of 16-bit numbers; it lies swizzled by 128 bytes."""

    def __init__(self, matrix: torch.Tensor, row_stride: int, box_rows: int, box_columns: int):
        """
        Args:
            matrix: [rows, columns], from its first element on; columns follow one another.
            row_stride: elements from a row to the next, whole 16 bytes.
            box_rows: rows of a box; those behind the matrix come as zeros.
            box_columns: columns of a box, 64 at most.
        """
        self._memory = ctypes.create_string_buffer(_MAP_BYTES + _MAP_ALIGNMENT)
        self.address = -(-ctypes.addressof(self._memory) // _MAP_ALIGNMENT) * _MAP_ALIGNMENT
        rows, columns = matrix.shape
        _call(
            "cuTensorMapEncodeTiled",
            ctypes.c_void_p(self.address), _NUMBER_TYPES[matrix.dtype], 2, ctypes.c_void_p(matrix.data_ptr()),
            (ctypes.c_uint64 * 2)(columns, rows),
            (ctypes.c_uint64 * 1)(row_stride * matrix.element_size()),
            (ctypes.c_uint32 * 2)(box_columns, box_rows), (ctypes.c_uint32 * 2)(1, 1),
            0, _SWIZZLE_128, _PROMOTE_128, 0,
        )  # fmt: skip


class Kernel:
    """A function of a compiled module, in the current device's context."""

    def __init__(self, code: bytes, name: str, shared_bytes: int):
        self._module, self._function = ctypes.c_void_p(), ctypes.c_void_p()
        self._shared_bytes = shared_bytes
        _call("cuModuleLoadData", ctypes.byref(self._module), code)
        _call("cuModuleGetFunction", ctypes.byref(self._function), self._module, name.encode())
        _call("cuFuncSetAttribute", self._function, _MOST_SHARED_ATTRIBUTE, shared_bytes)

    def launch(self, programs: int, threads: int, arguments: Sequence[Any]) -> None:
        """Launch on PyTorch's current stream; arguments are ctypes numbers, tensors and maps."""
        kept = [
            ctypes.c_void_p(argument.data_ptr()) if isinstance(argument, torch.Tensor) else argument
            for argument in arguments
        ]
        addresses = (ctypes.c_void_p * len(kept))(
            *(value.address if isinstance(value, TensorMap) else ctypes.addressof(value) for value in kept)
        )
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        _call(
            "cuLaunchKernel", self._function, programs, 1, 1, threads, 1, 1, self._shared_bytes, stream,
            addresses, None,
        )  # fmt: skip
