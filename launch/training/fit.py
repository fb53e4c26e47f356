"""The training loop, bounded by steps and by minutes, resumable from a checkpoint.

The learning rate follows progress, which is whichever of steps and time is further on: a run that is
given few minutes still ends on the low end of its schedule, so any run leaves a usable model.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

Judge = Callable[[], dict[str, float]]

SAVE_SECONDS = 60
# Steps between reads of the clock, each of which waits for the device; prime to the data's schedule.
LOOK_EVERY = 17


@dataclass
class Budget:
    """How long one stage may run, and the share of the peak learning rate at each point of it."""

    steps: int
    minutes: float
    warmup: int = 100

    def factor(self, step: int, progress: float) -> float:
        return min(1.0, (step + 1) / self.warmup) * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * progress)))


@dataclass
class Outcome:
    steps: int
    minutes: float
    loss: float
    judged: dict[str, float] | None = None


class Unfinished(Exception):
    """The time of this run is over; the checkpoint holds how far it got."""


def autocast(device: str):
    return torch.autocast(device, dtype=torch.bfloat16, enabled=device == "cuda")


def fit(
    label: str,
    model,
    loss_of,
    optimizers,
    budget: Budget,
    checkpoint: Path,
    device: str,
    until: float = math.inf,
    drafted: int | None = None,
    judge: Judge | None = None,
) -> Outcome:
    """Minimise loss_of(step, progress) over `model`'s parameters; `drafted` tokens a step are told as a rate.

    With a `judge`, asked every minute and at the end, the model ends as it was when its "loss" was least.

    Raises:
        SystemExit: the loss is no number any more; the checkpoint is one of before.
        Unfinished: the clock (time.time()) has passed `until` before the budget was spent.
    """
    step, seconds, smooth, best = 0, 0.0, math.nan, None
    if checkpoint.exists():
        state = torch.load(checkpoint, map_location=device)
        model.load_state_dict(state["model"])
        for optimizer, kept in zip(optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(kept)
        step, seconds, smooth = state["step"], state["seconds"], state["loss"]
        best = state["best"]
        print(f"[{label}] resuming at step {step}", flush=True)

    saved = printed = time.time()
    started, printed_step = saved - seconds, step
    peak = "" if device != "cuda" else "; {:.1f} GB of GPU memory at most"
    progress = max(step / budget.steps, seconds / 60 / budget.minutes)
    while progress < 1.0:
        for group in (group for optimizer in optimizers for group in optimizer.param_groups):
            group["lr"] = group["peak"] * budget.factor(step, progress)
        with autocast(device):
            loss = loss_of(step, progress)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        step += 1
        if step % LOOK_EVERY == 0 or step >= budget.steps:
            value = loss.item()
            if not math.isfinite(value):
                raise SystemExit(f"{label}: the loss is {value} at step {step}; try a lower --peak")
            smooth = value if math.isnan(smooth) else 0.8 * smooth + 0.2 * value
            now = time.time()
            seconds = now - started
            progress = max(step / budget.steps, seconds / 60 / budget.minutes)
            if now - printed > 10 or progress >= 1.0:
                each = (now - printed) / (step - printed_step)
                rate = "" if drafted is None else f", {drafted / each:,.0f} drafted tokens/s"
                print(
                    f"[{label}] step {step} loss {smooth:.4f} {seconds:.0f} s {100 * progress:.0f}%, "
                    f"{1000 * each:.1f} ms a step{rate}"
                    + peak.format(torch.cuda.max_memory_allocated() / 1e9 if peak else 0),
                    flush=True,
                )
                printed, printed_step, peak = now, step, ""
            is_over = now > until and progress < 1.0
            if now - saved > SAVE_SECONDS or progress >= 1.0 or is_over:
                saved = now
                if judge is not None and not is_over:
                    best = better_of(best, judge(), model, label)
                save_whole(
                    {
                        "model": model.state_dict(),
                        "optimizers": [o.state_dict() for o in optimizers],
                        "step": step,
                        "seconds": seconds,
                        "loss": smooth,
                        "best": best,
                    },
                    checkpoint,
                )
            if is_over:
                raise Unfinished(f"{label}: {100 * progress:.0f}% of the training is done")
    if best is not None:
        model.load_state_dict(best["model"])
    judged = None if best is None else best["judged"]
    return Outcome(step, round(seconds / 60, 2), round(smooth, 4), judged)


def better_of(best: dict | None, judged: dict[str, float], model, label: str) -> dict:
    """The best model so far, {"judged", "model"}, after one that was just judged; says how it was."""
    # A loss that is no number is beaten by any.
    is_better = best is None or math.isnan(best["judged"]["loss"]) or judged["loss"] <= best["judged"]["loss"]
    kept = None if is_better else best
    told = ", ".join(f"{name} {value}" for name, value in judged.items())
    print(f"[{label}] held back: {told}{' (the best)' if kept is None else ''}", flush=True)
    if kept is not None:
        return kept
    return {"judged": judged, "model": {name: t.detach().clone() for name, t in model.state_dict().items()}}


def save_whole(value, path: Path) -> None:
    """torch.save, so that whoever is killed while saving leaves the last file."""
    torch.save(value, path.with_suffix(".new"))
    path.with_suffix(".new").replace(path)
