"""The command line of train_drafter.py, for 20 minutes on one H200, and what holds a run to its settings."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable
from pathlib import Path

import torch
from export import write_json
from sampled_text import SHORTEST

BENCH_PROMPTS = sorted(Path(__file__).parent.parent.glob("bench/prompts*.json"))


def positive(kind: type, least: int | None = None) -> Callable[[str], int | float]:
    """A parser of numbers above zero, or of `least` at least."""

    def number(text: str) -> int | float:
        value = kind(text)
        if value < least if least is not None else not 0 < value < math.inf:
            raise argparse.ArgumentTypeError(
                f"{text} is not " + ("above 0" if least is None else f"{least} or more")
            )
        return value

    number.__name__ = "number"  # what argparse calls it in `invalid number value: 'x'`
    return number


def share(text: str) -> float:
    value = float(text)
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"{text} is not from 0 to 1")
    return value


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Train a DFlash drafter for any Hugging Face target, and measure what it is worth.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--target", type=Path, required=True, help="the target's Hugging Face folder")
    parser.add_argument("--out", type=Path, required=True, help="results and checkpoints go here")
    parser.add_argument("--name", help="what the model card calls the target; its folder's name by default")
    parser.add_argument(
        "--minutes", type=positive(float), default=20.0, help="of own text and training together"
    )
    parser.add_argument("--run-minutes", type=positive(float), default=9.5, help="end this run after so long")
    has_gpu = torch.cuda.is_available()
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if has_gpu else "cpu")
    drafter = parser.add_argument_group("drafter")
    drafter.add_argument("--block", type=positive(int, 2), default=16)
    drafter.add_argument("--layers", type=positive(int), default=5)
    drafter.add_argument("--intermediate", type=positive(int), default=1024, help="width of its MLPs")
    drafter.add_argument("--features", type=positive(int), default=5, help="target layers it sees")
    drafter.add_argument("--mask-token", help="a special token without a role; found by itself")
    own = parser.add_argument_group("the target's own text")
    own.add_argument(
        "--answers",
        choices=("sglang", "plain"),
        help="who writes it: SGLang if it is installed, or plain PyTorch",
    )
    own.add_argument(
        "--servers", type=positive(int), default=3, help="of SGLang on the GPU; 1 for a target of billions"
    )
    own.add_argument("--prompts", type=positive(int), default=32_000, help="made from parts and free text")
    own.add_argument(
        "--questions", type=positive(int, 0), default=160_000, help="that it tries to make up itself"
    )
    own.add_argument(
        "--own-tokens", type=positive(int, SHORTEST), default=256, help="new tokens an answer, at most"
    )
    own.add_argument(
        "--batch-tokens", type=positive(int), default=200_000, help="prompts and answers of a batch"
    )
    own.add_argument("--batch-rows", type=positive(int), default=256)
    own.add_argument("--longest", type=positive(int), default=4096, help="tokens of a prompt, at most")
    training = parser.add_argument_group("training")
    training.add_argument("--steps", type=positive(int), default=100_000, help="stop after so many steps")
    training.add_argument("--step-tokens", type=positive(int), default=16_384, help="tokens of text a step")
    training.add_argument("--step-blocks", type=positive(int), default=2048, help="blocks a step")
    training.add_argument("--peak", type=positive(float), default=0.02, help="learning rate of Muon")
    training.add_argument(
        "--soft", type=share, default=0.5, help="of each label that is the target's own distribution"
    )
    judging = parser.add_argument_group("evaluation")
    judging.add_argument("--eval-prompts", type=Path, nargs="+", default=BENCH_PROMPTS)
    judging.add_argument(
        "--eval-count", type=positive(int), default=1000, help="prompts of each kind, at most"
    )
    judging.add_argument("--eval-tokens", type=positive(int), default=192, help="new tokens a prompt")
    args = parser.parse_args()
    if args.device == "cuda" and not has_gpu:
        parser.error("--device cuda: PyTorch sees no GPU; --device cpu does without")
    if not (args.target / "config.json").is_file():
        parser.error(f"--target: no config.json in {args.target}")
    for file in args.eval_prompts:
        if not file.is_file():
            parser.error(f"--eval-prompts: there is no file {file}")
    if args.out.exists() and not args.out.is_dir():
        parser.error(f"--out: {args.out} is no folder")
    return args


def hold_to_settings(path: Path, wanted: dict) -> None:
    """Keep a new run's settings; refuse to go on with a run of others."""
    if not path.exists():
        write_json(path, wanted)
        return
    begun = json.loads(path.read_text())
    different = [name for name in wanted if begun.get(name) != wanted[name]]
    if different:
        name = different[0]
        raise SystemExit(
            f"{path.parent} was begun with another {name}: {begun.get(name)} there, {wanted[name]} now. "
            "Name another --out, or remove it."
        )
