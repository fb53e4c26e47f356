"""A test plugin that gives every rank of a tensor-parallel group random numbers of its own.

SGLang seeds them alike, which would hide that a decision is not shared.

    DDTREE_TEST_UNEVEN_RANKS   set: seed each DDTREE worker by its rank
"""

import os

import torch


def load() -> None:
    if not os.environ.get("DDTREE_TEST_UNEVEN_RANKS"):
        return
    from sglang.srt.runtime_context import get_parallel

    from sglang_ddtree_patch.worker import DDTreeWorker

    decode_round = DDTreeWorker._decode_round

    def seeded_by_rank(worker, batch, *arguments):
        torch.manual_seed(1000 * get_parallel().tp_rank + int(batch.seq_lens.sum()))
        return decode_round(worker, batch, *arguments)

    DDTreeWorker._decode_round = seeded_by_rank
