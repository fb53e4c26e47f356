"""Tile shapes worth measuring for a shape and a width: what `ddtree bench kernel --configs sweep` tries."""

from __future__ import annotations

from sglang_ddtree_patch.kernels.attention.configs import TreeAttentionConfig
from sglang_ddtree_patch.launch.bench.kernel_workload import ModelShape

# (block_m, block_n, warps, stages) -> programs a multiprocessor to try.
GQA_FEW = {
    (16, 64, 4, 5): (1, 2, 3),
    (16, 64, 4, 4): (3, 4),
    (16, 128, 4, 5): (1,),
    (16, 64, 2, 5): (2, 3),
    (16, 32, 4, 5): (2, 4),
    (64, 64, 4, 5): (1, 2),
}
GQA_ONE_TILE = {
    (64, 64, 4, 4): (1, 2),
    (64, 64, 4, 5): (1, 2),
    (64, 32, 4, 5): (2, 3),
    (64, 128, 4, 4): (1,),
    (64, 128, 4, 5): (1,),
    (64, 128, 8, 4): (1,),
}
GQA_MANY = {
    (128, 64, 8, 4): (1, 2),
    (128, 64, 8, 5): (1,),
    (128, 128, 8, 4): (1,),
    (128, 128, 8, 5): (1,),
}
MLA_FEW = {
    (16, 64, 8, 5): (1,),
    (16, 64, 4, 4): (1, 2),
    (16, 64, 8, 4): (1, 2),
    (16, 32, 4, 5): (1, 2),
    (16, 32, 8, 5): (1, 2),
    (64, 64, 8, 3): (1,),
}
MLA_MANY = {
    (64, 64, 8, 2): (1,),
    (64, 64, 8, 3): (1,),
    (64, 64, 8, 4): (1,),
    (64, 32, 8, 4): (1,),
    (64, 32, 8, 5): (1,),
}


def candidates(shape: ModelShape, rows: int) -> list[TreeAttentionConfig]:
    """Configurations to try, each with every number of programs a multiprocessor."""
    packed = rows * shape.heads // shape.kv_heads
    if shape.mla:
        tiles = MLA_FEW if packed <= 16 else MLA_MANY
    elif packed <= 16:
        tiles = GQA_FEW
    else:
        tiles = GQA_ONE_TILE if packed <= 64 else GQA_ONE_TILE | GQA_MANY
    return [TreeAttentionConfig(*tile, programs) for tile, counts in tiles.items() for programs in counts]
