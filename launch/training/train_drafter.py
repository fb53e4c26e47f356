"""Train a DFlash drafter for any Hugging Face target, and measure how much of a draft is accepted.

    python launch/training/train_drafter.py --target FOLDER --out RUN --minutes 25

Needs this package, torch, transformers and safetensors; SGLang for quick answers. Stages, each skipped when
its result is already under --out:

    prompts   many, of several kinds (prompts.py)
    own       questions that the target makes up (questions.py) and its own text, answered in pieces
              (sampled_text.py): four tenths of --minutes at most
    train     the drafter, on hidden states kept in memory as far as they fit: the rest of --minutes
    export    RUN/draft in bf16 for SGLang, RUN/packed with int8 rows, which the first is expanded from
    evaluate  accept length by kind of prompt, on prompts that training never saw
    card      RUN/packed/README.md, from what the others measured

A run ends by itself after --run-minutes, with exit code 3 while there is more to do: the same command goes
on.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import importlib.util
import json
import random
import sys
import time

import torch
from acceptance import Text, evaluate
from answers import Answer, PlainAnswers, ServedAnswers, continue_batch
from card import model_card
from draft_steps import DraftSteps
from drafter import Drafter, draft_config
from drafter_arguments import hold_to_settings, parse
from export import write_json
from fit import Budget, Unfinished, fit, save_whole
from hf_target import HFTarget
from optimizers import muon
from prompts import make_prompts
from questions import ask
from safetensors.torch import load_file
from sampled_text import SHORTEST, batches, read_own_text, read_seconds, write_own_text
from validation import Validation, split

from sglang_ddtree_patch.launch.int8_rows import expand, write_packed
from sglang_ddtree_patch.launch.run_folder import exit_on_signals

OWN_SHARE = 0.4  # of --minutes, at most
ASKING_SHARE = 0.25  # of that, for questions
SETUP_SECONDS = 90  # of a training that begins anew: hidden states, compiling
MORE_TO_DO = 3
INTERRUPTED = 130


class Run:
    """One drafter's stages, and where each leaves its result."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.device, self.until = args, args.device, time.time() + 60 * args.run_minutes
        self.target = HFTarget(args.target, args.device)
        if self.target.positions <= args.own_tokens + args.block:
            raise SystemExit(
                f"--own-tokens {args.own_tokens}: with a block of {args.block} they leave no room for a "
                f"prompt in the target's {self.target.positions} positions."
            )
        self.mask = self.target.mask_token(args.mask_token)
        self.layers = self.target.feature_layers(args.features)
        args.out.mkdir(parents=True, exist_ok=True)
        hold_to_settings(args.out / "settings.json", self.settings())
        self.wrote = False  # own text, in this run
        self.report_path = args.out / "report.json"
        self.report = json.loads(self.report_path.read_text()) if self.report_path.exists() else {}

    def settings(self) -> dict:
        """What has to stay the same while a run is taken up: its stages build on one another."""
        args, target = self.args, json.dumps(self.target.config, sort_keys=True)
        names = (
            "block", "layers", "intermediate", "prompts", "questions", "own_tokens", "soft",
            "batch_rows", "batch_tokens", "longest",
        )  # fmt: skip
        return {
            **{name: getattr(args, name) for name in names},
            "features": list(self.layers),
            "mask_token": self.mask[0],
            "target": hashlib.sha256(target.encode()).hexdigest(),
        }

    def note(self, **facts) -> None:
        self.report.update(facts)
        write_json(self.report_path, self.report)

    def where(self) -> str:
        return torch.cuda.get_device_name() if self.device == "cuda" else "CPU"

    def check_time(self, what: str, seconds: float = 0) -> None:
        """Whether `what` may begin in this run: so many seconds before its end are too few."""
        if time.time() > self.until - seconds:
            raise Unfinished(f"{what} has not begun")

    def prompts(self) -> None:
        path, args = self.args.out / "prompts.json", self.args
        if path.exists():
            return
        made = make_prompts(args.prompts)
        write_json(path, made)
        print(f"[prompts] {len(made):,} prompts", flush=True)

    def own(self) -> None:
        args, target = self.args, self.target
        folder = args.out / "own"
        if not (folder / "finished").exists():
            self.check_time("own text")
            torch.manual_seed(1)
            self.wrote, answerer = True, self.answerer()
            with answerer as answer:
                began = time.time()  # a server's start comes on top: the text must not suffer by it
                prompts = json.loads((args.out / "prompts.json").read_text())
                minutes = OWN_SHARE * args.minutes
                asking_ends = min(self.until, began + 60 * ASKING_SHARE * minutes)
                prompts += self.questions(answer, answerer.at_once, asking_ends)
                longest = min(args.longest, target.positions - args.own_tokens - args.block)
                ids = [found[:longest] for found in target.prompts_ids(prompts)]
                groups = list(batches(ids, args.own_tokens, args.batch_tokens, args.batch_rows))
                random.Random(0).shuffle(groups)  # of all lengths, however few there is time for
                write_own_text(
                    answer, answerer.at_once, groups, folder, args.own_tokens, minutes, self.until, began
                )
        texts = read_own_text(folder)
        tokens = sum(len(ids) - first for first, ids in texts)
        self.note(own_text={"answers": len(texts), "tokens": tokens, "seconds": read_seconds(folder)})

    def questions(self, answer: Answer, at_once: int, until: float) -> list[dict[str, str]]:
        path, args = self.args.out / "questions.json", self.args
        if not path.exists():
            judged = {prompt["text"] for file in args.eval_prompts for prompt in json.loads(file.read_text())}
            made = ask(answer, at_once, self.target, args.questions, args.batch_rows, until)
            write_json(path, [prompt for prompt in made if prompt["text"] not in judged])
        return json.loads(path.read_text())

    def answerer(self) -> ServedAnswers | PlainAnswers:
        has_sglang = importlib.util.find_spec("sglang") is not None
        if (self.args.answers or ("sglang" if has_sglang else "plain")) == "sglang":
            servers = self.args.servers if self.device == "cuda" else 1
            return ServedAnswers(self.args.target, self.target.end_ids, self.device, servers)
        return PlainAnswers(self.target.model, self.target.end_ids, self.device)

    def train(self) -> None:
        args, path = self.args, self.args.out / "drafter.pt"
        if path.exists():
            return
        self.check_time("training", SETUP_SECONDS if self.wrote else 0)
        # A resumed run goes on with other draws than the run it takes up.
        torch.manual_seed(int(time.time()))
        config = draft_config(
            self.target.config,
            mask=self.mask,
            feature_layers=self.layers,
            block=args.block,
            layers=args.layers,
            intermediate=args.intermediate,
        )
        target, texts = self.target.model(), read_own_text(args.out / "own")
        if not texts:
            raise SystemExit(
                f"no answer in {args.out}/own has {SHORTEST} tokens: there is nothing to learn from"
            )
        drafter = Drafter(config)
        with torch.no_grad():  # logits of about unit size at first, whatever the size of the target's head
            head = target.get_output_embeddings().weight
            drafter.norm.weight.fill_(1 / head.float().norm(dim=1).mean().item())
        drafter = drafter.to(self.device).train()
        size = sum(p.numel() for p in drafter.parameters())
        print(f"[train] {size:,} parameters, target layers {self.layers}", flush=True)
        learned, held = split(texts)
        size_of_step = (args.step_tokens, args.step_blocks)
        outcome = fit(
            "train",
            drafter,
            DraftSteps(drafter, target, self.layers, learned, *size_of_step, args.soft, self.device),
            muon(drafter, args.peak, self.device),
            Budget(args.steps, training_minutes(args.minutes, read_seconds(args.out / "own") / 60)),
            args.out / "train.pt",
            self.device,
            self.until,
            drafted=args.step_blocks * (args.block - 1),
            judge=Validation(drafter, target, self.layers, held, *size_of_step, self.device),
        )
        write_json(args.out / "draft_config.json", config)
        self.note(train={**dataclasses.asdict(outcome), "parameters": size, "device": self.where()})
        save_whole(drafter.state_dict(), path)  # last: where it is, the stage is over

    def export(self) -> None:
        packed = self.args.out / "packed"
        weights = torch.load(self.args.out / "drafter.pt", map_location="cpu")
        size = write_packed(weights, self.args.out / "draft_config.json", packed)
        expand(packed, self.args.out / "draft")
        print(f"[export] {packed}: {size / 1e6:.1f} MB", flush=True)
        self.note(packed_bytes=size)

    def evaluate(self) -> None:
        if "evaluation" in self.report:
            return
        self.check_time("evaluation")
        if self.device == "cuda":
            torch.cuda.empty_cache()  # what training held is free, and is given back
        config = json.loads((self.args.out / "draft_config.json").read_text())
        model = self.target.model()
        texts = self.greedy_texts(model)
        results = {}
        for name, weights in (
            ("unpacked", torch.load(self.args.out / "drafter.pt", map_location="cpu")),
            ("packed", load_file(self.args.out / "draft" / "model.safetensors")),
        ):
            drafter = Drafter(config)
            drafter.load_state_dict({key: value.float() for key, value in weights.items()})
            drafter = drafter.to(self.device, model.dtype).eval()
            results[name] = evaluate(model, drafter, texts, self.layers, self.device)
            print(f"[evaluate] {name}: {json.dumps(results[name]['accept_length'], indent=1)}", flush=True)
        self.note(evaluation={**results, "new_tokens": self.args.eval_tokens, "dtype": str(model.dtype)})

    def greedy_texts(self, model) -> list[Text]:
        """The held-out prompts with the target's greedy answers; prompts that do not fit are left out."""
        args, block = self.args, self.args.block
        counts: dict[str, int] = {}
        chosen = []
        for path in args.eval_prompts:
            for prompt in json.loads(path.read_text()):
                ids = self.target.prompt_ids(prompt)
                counts[prompt["kind"]] = counts.get(prompt["kind"], 0) + 1
                fits = len(ids) + args.eval_tokens + block <= self.target.positions
                if fits and counts[prompt["kind"]] <= args.eval_count:
                    chosen.append((prompt["kind"], ids))
        kinds = {tuple(ids): kind for kind, ids in chosen}
        texts = []
        lists = [ids for _, ids in chosen]
        for batch in batches(lists, args.eval_tokens + block, args.batch_tokens, args.batch_rows):
            answers = continue_batch(
                model, batch, [0.0] * len(batch), args.eval_tokens + block, self.target.end_ids, self.device
            )
            for prompt, answer in zip(batch, answers, strict=True):
                ids, first = prompt + answer, len(prompt)
                # No round starts at the end token, nor in the block that is there to be looked at.
                last = min(first + args.eval_tokens, len(ids) - 1)
                if last > first:
                    texts.append(Text(kinds[tuple(prompt)], ids, first, last))
        print(f"[evaluate] {len(texts)} prompts", flush=True)
        return texts

    def card(self) -> None:
        folder = self.args.target.resolve()
        # A model's folder holds target/ and draft/ here.
        name = self.args.name or (folder.parent if folder.name == "target" else folder).name
        config = json.loads((self.args.out / "draft_config.json").read_text())
        (self.args.out / "packed" / "README.md").write_text(model_card(name, config, self.report))


def training_minutes(minutes: float, own_minutes: float) -> float:
    """What own text left of its share goes to training; what it took beyond comes on top of `minutes`."""
    return max(minutes - own_minutes, (1 - OWN_SHARE) * minutes)


def main() -> int:
    args = parse()
    exit_on_signals()  # a server that writes answers goes with this process
    if args.device == "cpu":
        torch.set_num_threads(1)
    else:
        # cuDNN's attention fails in the backward pass with a mask (torch 2.14.1).
        torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        run = Run(args)
        for stage in (run.prompts, run.own, run.train, run.export, run.evaluate, run.card):
            stage()
    except Unfinished as state:
        print(f"{state}. Type the same command again to go on.", flush=True)
        return MORE_TO_DO
    except KeyboardInterrupt:
        print("Interrupted. Type the same command again to go on.", flush=True)
        return INTERRUPTED
    print(f"done: {args.out}/draft", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
