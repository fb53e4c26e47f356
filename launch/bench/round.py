"""Time what a decode round launches around its two forwards: tree build, accept, commit and the small rest.

    python -m sglang_ddtree_patch.launch.bench.round --json round.json

From a checkout that is the same command, in its root. Every part is first compared with plain PyTorch on the
same input; one that is off ends the run. Two medians each: replays of a CUDA graph of the part, which is
what the GPU needs, and single launches from Python, which is what a round waits for where the host is
not ahead of the GPU.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Callable, Sequence
from datetime import UTC, datetime

import torch
import triton

from sglang_ddtree_patch.kernels.accept.walk import accept_greedy, accept_greedy_torch
from sglang_ddtree_patch.kernels.commit import RowBuffers, commit_rows
from sglang_ddtree_patch.kernels.slots import next_slots, next_slots_torch
from sglang_ddtree_patch.kernels.tree.build import build_token_tree, build_token_tree_torch
from sglang_ddtree_patch.kernels.tree.candidates import top_log_probs, top_log_probs_torch
from sglang_ddtree_patch.launch.bench.kernel_timing import REPLAYS, graph_microseconds

MODULE = "sglang_ddtree_patch.launch.bench.round"
POINTS = [(1, 16), (1, 64), (8, 32), (32, 16), (32, 64)]  # batch, width
REPEATS = 8  # of a part in one graph
AGREEMENT = 0.75  # how often the target's token after a row is one of its children

# The shapes of Qwen3-8B with its DFlash drafter, whose target hands over the hidden states of 5 layers.
BLOCK, CANDIDATES, VOCABULARY, LAYERS, KV_HEADS, HEAD_DIM, HIDDEN = 16, 8, 151936, 36, 8, 128, 5 * 4096
# The parts that a round's budget counts; choosing the target's tokens and the drafter's candidates reads
# whole rows of logits, and is measured beside it.
BUDGETED = ("slots", "tree", "masks", "accept", "commit", "hidden states")


class Round:
    """One batch's inputs on the GPU, and the parts of its round as calls."""

    def __init__(self, batch: int, width: int):
        self.batch, self.width, self.path = batch, width, min(width, BLOCK)
        depths = BLOCK - 1
        self.draft_logits = 3 * torch.randn(batch * depths, VOCABULARY, device="cuda").bfloat16()
        top = top_log_probs_torch(self.draft_logits, CANDIDATES)
        self.candidates, self.log_probs = (one.view(batch, depths, CANDIDATES) for one in top)
        self.roots = torch.randint(0, VOCABULARY, (batch,), device="cuda")
        self.lens = torch.randint(1000, 4000, (batch,), device="cuda")
        self.tree = build_token_tree_torch(*self.tree_inputs)
        self.predictions = self._predictions()
        self.accepted = accept_greedy_torch(*self.walk_inputs)

        block = max(width, BLOCK)
        self.slots = torch.randperm(batch * block, device="cuda").view(batch, block)
        table = torch.randint(0, 1 << 20, (batch, 4096 + block), dtype=torch.int32, device="cuda")
        block_ids = torch.zeros((batch, BLOCK), dtype=torch.int64, device="cuda")
        requests = torch.randperm(batch, device="cuda")
        self.slot_inputs = (table, requests, self.lens, self.roots, block_ids, block)
        shape = (batch * block, KV_HEADS, HEAD_DIM)
        self.layers = [torch.randn(shape, device="cuda").bfloat16() for _ in range(2 * LAYERS)]
        self.buffers = RowBuffers.of(self.layers)
        self.hidden = torch.randn(batch * width, HIDDEN, device="cuda").bfloat16()
        self.logits = torch.randn(batch * width, VOCABULARY, device="cuda")
        self.mask_buffer = torch.empty_like(self.tree.masks)

    @property
    def tree_inputs(self) -> tuple:
        return self.roots, self.candidates, self.log_probs, self.width, self.lens

    @property
    def walk_inputs(self) -> tuple:
        return self.tree.tokens, self.tree.parents, self.predictions, self.path, self.lens

    def _predictions(self) -> torch.Tensor:
        """The target's token after every row: often one of the row's children."""
        guesses = torch.randint(0, VOCABULARY, (self.batch, self.width), device="cuda")
        children = guesses.scatter(1, self.tree.parents[:, 1:].clamp(min=0), self.tree.tokens[:, 1:])
        return torch.where(torch.rand(guesses.shape, device="cuda") < AGREEMENT, children, guesses)

    def parts(self) -> dict[str, Callable[[], object]]:
        """Every part in the order of the round."""
        return {
            "slots": lambda: next_slots(*self.slot_inputs),
            "drafter's candidates": lambda: top_log_probs(self.draft_logits, CANDIDATES),
            "tree": lambda: build_token_tree(*self.tree_inputs),
            "masks": lambda: self.mask_buffer.copy_(self.tree.masks),
            "target's argmax": lambda: self.logits.argmax(-1),
            "accept": lambda: accept_greedy(*self.walk_inputs),
            "commit": lambda: commit_rows(self.buffers, self.slots, self.accepted.rows),
            "hidden states": lambda: self.hidden[self.accepted.block_rows.flatten()],
        }

    def check(self) -> None:
        """Compare slots, candidates, tree, accept and commit with plain PyTorch.

        Raises:
            AssertionError: one differs.
        """
        tokens, log_probs = top_log_probs(self.draft_logits, CANDIDATES)
        torch.testing.assert_close(tokens, self.candidates.flatten(0, 1), rtol=0, atol=0)
        torch.testing.assert_close(log_probs, self.log_probs.flatten(0, 1), rtol=1e-5, atol=1e-5)
        for ours, reference in zip(
            next_slots(*self.slot_inputs), next_slots_torch(*self.slot_inputs), strict=True
        ):
            torch.testing.assert_close(ours, reference, rtol=0, atol=0)
        for ours, reference in (
            (build_token_tree(*self.tree_inputs), self.tree),
            (accept_greedy(*self.walk_inputs), self.accepted),
        ):
            for name, value in vars(reference).items():
                torch.testing.assert_close(getattr(ours, name), value, rtol=0, atol=0)
        expected = []
        for layer in self.layers[:: 2 * LAYERS - 1]:
            moved = layer.clone()
            moved[self.slots[:, : self.path]] = layer[self.slots.gather(1, self.accepted.rows)]
            expected.append(moved)
        commit_rows(self.buffers, self.slots, self.accepted.rows)
        for layer, moved in zip(self.layers[:: 2 * LAYERS - 1], expected, strict=True):
            torch.testing.assert_close(layer, moved, rtol=0, atol=0)


def eager_microseconds(call: Callable[[], object]) -> float:
    """Median time of one launch from Python, by events."""
    call()
    torch.cuda.synchronize()
    spans = [
        (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))
        for _ in range(3 * REPLAYS)
    ]
    for start, end in spans:
        start.record()
        call()
        end.record()
    torch.cuda.synchronize()
    return sorted(start.elapsed_time(end) for start, end in spans)[len(spans) // 2] * 1e3


def measure(batch: int, width: int) -> list[dict]:
    """One row a part, and "all": the budgeted parts one after another."""
    work = Round(batch, width)
    work.check()
    parts = work.parts()
    budgeted = [parts[name] for name in BUDGETED]
    parts["all"] = lambda: [part() for part in budgeted]
    times: dict[str, tuple[float | None, float]] = {
        name: (graph_microseconds([part] * REPEATS), eager_microseconds(part)) for name, part in parts.items()
    }
    times["tree in PyTorch"] = None, eager_microseconds(lambda: build_token_tree_torch(*work.tree_inputs))
    times["accept in PyTorch"] = None, eager_microseconds(lambda: accept_greedy_torch(*work.walk_inputs))
    rows = []
    for name, (in_graph, eager) in times.items():
        shown = "" if in_graph is None else f"{in_graph:.1f} us in a graph"
        print(f"batch {batch:3}  width {width:3}  {name:22}{shown:>20}{eager:9.1f} us eager", flush=True)
        rows.append(
            {
                "part": name, "batch": batch, "width": width, "block": BLOCK, "candidates": CANDIDATES,
                "graph_microseconds": in_graph, "eager_microseconds": eager,
            }
        )  # fmt: skip
    return rows


def main(argv: Sequence[str] | None = None) -> None:
    argv = sys.argv[1:] if argv is None else argv
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", help="write the results here")
    options = parser.parse_args(argv)
    torch.manual_seed(0)
    rows = [row for batch, width in POINTS for row in measure(batch, width)]
    if options.json:
        report = {
            "device": torch.cuda.get_device_name(),
            "versions": {"torch": torch.__version__, "triton": triton.__version__},
            "command": shlex.join(["python", "-m", MODULE, *argv]),
            "date": datetime.now(UTC).strftime("%Y-%m-%d"),
            "rows": rows,
        }
        with open(options.json, "w") as file:
            json.dump(report, file, indent=1)


if __name__ == "__main__":
    main()
