"""Read a GGUF file: its metadata and its tensors, dequantized to float32.

Only what SmolLM2's file holds is read: version 3, little-endian, tensors in F32, Q8_0 and Q4_1. A block is 32
values in a row:

    Q8_0   f16 scale d, 32 int8 q                      value = d * q
    Q4_1   f16 scale d, f16 minimum m, 16 bytes        value = d * q + m, low nibbles are values 0 .. 15

The layout is the one that the GGUF specification describes. SGLang brings a package that reads the format
too, but takes half a minute for a vocabulary of this size; it serves as the check instead (check.py).
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any

import numpy as np

MAGIC = b"GGUF"
VERSION = 3
BLOCK = 32  # values that share a scale
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
STRING, ARRAY = 8, 9
F32, Q4_1, Q8_0 = 0, 3, 8
BYTES_PER_BLOCK = {F32: 4 * BLOCK, Q4_1: 20, Q8_0: 34}


class GGUFError(ValueError):
    """The file is no GGUF file that can be read here."""


@dataclass(frozen=True)
class TensorInfo:
    """Where a tensor lies. The shape is NumPy's: rows first, the reverse of the file's own."""

    shape: tuple[int, ...]
    kind: int
    offset: int  # bytes from the start of the data


class GGUFFile:
    """`metadata` by key; `tensors` by name; `read(name)` dequantizes one."""

    def __init__(self, content: bytes) -> None:
        self._content, self._at = content, 4
        if content[:4] != MAGIC:
            raise GGUFError("it does not begin with GGUF")
        version = self._scalar("I")
        if version != VERSION:
            raise GGUFError(f"it has GGUF version {version}, and {VERSION} is read here")
        tensors, pairs = self._scalar("Q"), self._scalar("Q")
        self.metadata: dict[str, Any] = {}
        for _ in range(pairs):
            key = self._string()
            self.metadata[key] = self._value(self._scalar("I"))
        self.tensors: dict[str, TensorInfo] = {}
        for _ in range(tensors):
            name, dimensions = self._string(), self._scalar("I")
            shape = tuple(self._scalar("Q") for _ in range(dimensions))[::-1]
            self.tensors[name] = TensorInfo(shape, self._scalar("I"), self._scalar("Q"))
        alignment = self.metadata.get("general.alignment", 32)
        self._data = -(-self._at // alignment) * alignment

    def read(self, name: str) -> np.ndarray:
        """The tensor in float32, with NumPy's shape."""
        info = self.tensors[name]
        if info.kind not in BYTES_PER_BLOCK:
            raise GGUFError(f"tensor {name} has the quantization {info.kind}, which is not read here")
        count = int(np.prod(info.shape))
        size = count * BYTES_PER_BLOCK[info.kind] // BLOCK
        raw = np.frombuffer(self._content, np.uint8, size, self._data + info.offset)
        if info.kind == F32:
            return raw.view("<f4").reshape(info.shape)
        blocks = raw.reshape(-1, BYTES_PER_BLOCK[info.kind])
        return (q8_0(blocks) if info.kind == Q8_0 else q4_1(blocks)).reshape(info.shape)

    def _scalar(self, code: str) -> Any:
        (value,) = struct.unpack_from("<" + code, self._content, self._at)
        self._at += struct.calcsize("<" + code)
        return value

    def _string(self) -> str:
        length = self._scalar("Q")
        self._at += length
        return self._content[self._at - length : self._at].decode()

    def _value(self, kind: int) -> Any:
        if kind == STRING:
            return self._string()
        if kind == ARRAY:
            of, count = self._scalar("I"), self._scalar("Q")
            return [self._value(of) for _ in range(count)]
        return self._scalar(SCALARS[kind])


def q8_0(blocks: np.ndarray) -> np.ndarray:
    """uint8 [blocks, 34] -> float32 [blocks, 32]"""
    scale = blocks[:, :2].view("<f2").astype(np.float32)
    return scale * blocks[:, 2:].view(np.int8).astype(np.float32)


def q4_1(blocks: np.ndarray) -> np.ndarray:
    """uint8 [blocks, 20] -> float32 [blocks, 32]"""
    scale, minimum = blocks[:, 0:2].view("<f2"), blocks[:, 2:4].view("<f2")
    nibbles = blocks[:, 4:]
    values = np.concatenate([nibbles & 15, nibbles >> 4], axis=1).astype(np.float32)
    return scale.astype(np.float32) * values + minimum.astype(np.float32)
