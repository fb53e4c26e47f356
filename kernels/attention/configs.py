"""Tile shapes of tree verify attention, and how many splits a launch makes of the keys.

A table instead of an autotuner: serving must neither measure nor compile anything twice. One entry fits
one class of GPU, one kind of head, one element size and a range of packed rows (tree rows times query
heads a KV head).

A class is what a program may use of shared memory and how its tensor cores multiply: Hopper (227 KB) and
the data-center Blackwells (227 KB) take 64 rows at a time, A100 (163 KB) and the rest (99 KB: sm_86, sm_89,
sm_120 and whatever is not named here) 16. Stages look high because the look-up of a page's slot takes one
or two of them: on 16-row tensor cores 5 stages keep two blocks of keys in flight, 3 keep one.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch


@dataclass(frozen=True)
class TreeAttentionConfig:
    block_m: int  # packed rows of a tile
    block_n: int  # keys of a block
    warps: int
    stages: int  # of the pipeline over key blocks; a page look-up takes one of them
    programs_per_sm: int  # how many programs a launch aims for, for each multiprocessor

    @property
    def tail_block(self) -> int:
        """Keys of a block of the masked tail; its mask must fit two 64-bit words."""
        return min(self.block_n, 64)


@dataclass(frozen=True)
class HeadShape:
    """What of a model's attention decides the tile."""

    key_dim: int
    value_dim: int
    value_is_key: bool  # MLA: the value is the key's first `value_dim` columns
    element_size: int  # bytes of a query element, which is what the dot products run in

    @property
    def kind(self) -> str:
        if self.value_is_key:
            return "mla"
        return "gqa" if max(self.key_dim, self.value_dim) <= 128 else "gqa-wide"


# (GPU class, kind of head, bytes an element) -> [(up to this many packed rows, config)], smallest first.
# The last entry serves any number of rows.
ANY = 1 << 30
_Config = TreeAttentionConfig
CONFIGS: dict[tuple[str, str, int], list[tuple[int, TreeAttentionConfig]]] = {
    ("hopper", "gqa", 2): [(16, _Config(16, 64, 4, 5, 3)), (ANY, _Config(64, 64, 4, 5, 2))],
    ("hopper", "gqa-wide", 2): [(16, _Config(16, 64, 4, 5, 1)), (ANY, _Config(64, 64, 8, 4, 1))],
    ("hopper", "mla", 2): [(16, _Config(16, 64, 8, 5, 1)), (ANY, _Config(64, 64, 8, 3, 1))],
    ("blackwell", "gqa", 2): [(16, _Config(16, 64, 4, 5, 3)), (ANY, _Config(64, 64, 4, 4, 2))],
    ("blackwell", "gqa-wide", 2): [(16, _Config(16, 64, 4, 5, 1)), (ANY, _Config(64, 64, 8, 4, 1))],
    ("blackwell", "mla", 2): [(16, _Config(16, 64, 8, 5, 1)), (ANY, _Config(64, 32, 8, 4, 1))],
    ("ampere", "gqa", 2): [(16, _Config(16, 64, 4, 5, 2)), (ANY, _Config(64, 64, 4, 5, 1))],
    ("ampere", "gqa-wide", 2): [(16, _Config(16, 32, 4, 5, 1)), (ANY, _Config(64, 32, 8, 5, 1))],
    ("ampere", "mla", 2): [(16, _Config(16, 32, 8, 5, 1)), (ANY, _Config(32, 32, 8, 5, 1))],
    ("compact", "gqa", 2): [(16, _Config(16, 64, 4, 5, 1)), (ANY, _Config(64, 64, 4, 5, 1))],
    ("compact", "gqa-wide", 2): [(16, _Config(16, 32, 4, 5, 1)), (ANY, _Config(32, 32, 8, 5, 1))],
    ("compact", "mla", 2): [(ANY, _Config(16, 32, 8, 5, 1))],
    # float32 runs on the plain cores and serves tests and comparisons, not speed.
    ("any", "gqa", 4): [(ANY, _Config(16, 32, 4, 3, 2))],
    ("any", "gqa-wide", 4): [(ANY, _Config(16, 16, 4, 3, 1))],
    ("any", "mla", 4): [(ANY, _Config(16, 16, 8, 3, 1))],
}
# Shared memory one program may use, bytes, and the compute capabilities of each class.
SHARED_MEMORY = {"hopper": 232_448, "blackwell": 232_448, "ampere": 166_912, "compact": 101_376}
GPU_CLASSES = {(8, 0): "ampere", (9, 0): "hopper", (10, 0): "blackwell", (10, 3): "blackwell"}
# The interpreter pays by operation, so few large ones.
INTERPRETER_CONFIG = TreeAttentionConfig(block_m=64, block_n=64, warps=4, stages=1, programs_per_sm=1)
INTERPRETER_SM_COUNT = 1


def gpu_class(capability: tuple[int, int]) -> str:
    """The row of the table for a compute capability."""
    if capability < (8, 0):
        raise RuntimeError(
            "tree attention needs compute capability 8.0 or newer; "
            f"this GPU has {capability[0]}.{capability[1]}"
        )
    return GPU_CLASSES.get(capability, "compact")


def choose_config(capability: tuple[int, int], head: HeadShape, packed_rows: int) -> TreeAttentionConfig:
    """The table's entry for one GPU, one model and one width of the tree."""
    gpu = "any" if head.element_size == 4 else gpu_class(capability)
    table = CONFIGS[gpu, head.kind, head.element_size]
    return next(config for limit, config in table if packed_rows <= limit)


def split_count(sm_count: int, config: TreeAttentionConfig, kv_heads: int, tiles: int, batch: int) -> int:
    """Splits a launch makes of the keys, all requests together.

    Enough to fill the GPU once, and never fewer than two a request, so that a long request among short
    ones can be cut. Decided by shapes alone: one CUDA graph serves every context length.
    """
    return max(sm_count * config.programs_per_sm // (kv_heads * tiles), 2 * batch)


@lru_cache
def device_properties(device: torch.device) -> tuple[tuple[int, int], int]:
    """Compute capability and number of multiprocessors."""
    properties = torch.cuda.get_device_properties(device)
    return (properties.major, properties.minor), properties.multi_processor_count


def converts_e4m3(device: torch.device) -> bool:
    """Whether the GPU has an instruction that converts float8 e4m3, without which Triton has no such type."""
    capability, _ = device_properties(device)
    return capability >= (8, 9)
