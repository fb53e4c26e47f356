"""A test plugin that lets nothing but DDTREE's own rules keep the ranks of a tensor-parallel group alike.

SGLang seeds their random numbers alike, which would hide that a decision is not shared: here each rank has
its own. The drafter's log-probs are rounded, so that most of a tree is a matter of ties. The clocks of all
ranks but the first are wrong. And each tree is compared with those of the other ranks: one that differs ends
the server.

    DDTREE_TEST_UNEVEN_RANKS   set: all four
"""

import os
import random

import torch

STEPS = 4  # log-probs that are left between two whole ones


def load() -> None:
    if not os.environ.get("DDTREE_TEST_UNEVEN_RANKS"):
        return
    from sglang.srt.distributed import get_tp_group
    from sglang.srt.runtime_context import get_parallel

    from sglang_ddtree_patch.metrics.round_times import RoundTimes
    from sglang_ddtree_patch.round import worker

    step_seconds, clock = RoundTimes.step_seconds, random.Random(1)

    def by_a_wrong_clock(times):
        seconds, rank = step_seconds(times), get_parallel().tp_rank
        return seconds if seconds is None or rank == 0 else seconds * clock.uniform(0.1, 10)

    RoundTimes.step_seconds = by_a_wrong_clock
    decode_round, build = worker.DDTreeWorker._decode_round, worker.build_token_tree

    def seeded_by_rank(owner, batch, *arguments):
        torch.manual_seed(1000 * get_parallel().tp_rank + int(batch.seq_lens.sum()))
        return decode_round(owner, batch, *arguments)

    def built_alike(roots, tokens, log_probs, *arguments):
        tree = build(roots, tokens, (STEPS * log_probs).round() / STEPS, *arguments)
        mine = torch.stack([tree.tokens, tree.parents]).cpu()  # what gloo takes
        everyones = [torch.empty_like(mine) for _ in range(get_parallel().tp_size)]
        torch.distributed.all_gather(everyones, mine, group=get_tp_group().cpu_group)
        if not all(torch.equal(mine, other) for other in everyones):
            raise RuntimeError("the ranks have built different trees")
        return tree

    worker.DDTreeWorker._decode_round = seeded_by_rank
    worker.build_token_tree = built_alike
