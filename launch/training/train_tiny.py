"""Train one tiny target and its DFlash drafter, then measure how much of a draft is accepted.

    python launch/training/train_tiny.py --model gqa --out runs/tiny

Needs torch, transformers, tokenizers and safetensors; SGLang is not used. Stages, each skipped when its
result is already under --out: corpus and vocabulary, target, the target's own text, drafter, evaluation.
A stage that is cut short resumes from its last checkpoint. The folders written, OUT/tiny-NAME/target and
OUT/tiny-NAME/draft, are what a server loads; OUT/tiny-NAME.json holds the numbers.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import time
from pathlib import Path

import torch
from acceptance import Text, evaluate
from corpus import load_corpus
from drafter import Drafter, draft_config
from export import write_drafter, write_json, write_target
from fit import Budget, fit
from optimizers import adamw, muon
from safetensors.torch import load_file
from targets import CONFIGS, FEATURE_LAYERS, greedy, load_target, new_target
from tiny_losses import drafter_loss, held_out_loss, own_text, target_loss
from tokenizers import Tokenizer
from vocabulary import END_ID, MASK, MASK_ID, VOCAB_SIZE

PROMPTS = Path(__file__).parent / "held_out_prompts.json"
DRAFT = {
    "mask": (MASK, MASK_ID),
    "feature_layers": FEATURE_LAYERS,
    "block": 8,
    "layers": 4,
    "intermediate": 64,
}
EVALUATED_TOKENS = 160


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", choices=sorted(CONFIGS), required=True)
    parser.add_argument("--out", type=Path, required=True, help="results, checkpoints and corpus go here")
    parser.add_argument(
        "--corpus", type=Path, help="a Python standard library folder (default: this Python's)"
    )
    parser.add_argument("--stages", default="corpus,target,own,draft,evaluate", help="which stages to run")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--target-minutes", type=float, default=4.0)
    parser.add_argument("--target-steps", type=int, default=30_000)
    parser.add_argument("--target-tokens", type=int, default=32_768, help="tokens a step")
    parser.add_argument("--draft-minutes", type=float, default=3.0)
    parser.add_argument("--draft-steps", type=int, default=30_000)
    parser.add_argument("--draft-rows", type=int, default=64, help="sequences a step")
    parser.add_argument("--draft-blocks", type=int, default=32, help="blocks a sequence")
    parser.add_argument("--own-groups", type=int, default=15, help="batches of the target's own text")
    parser.add_argument("--own-rows", type=int, default=1024)
    parser.add_argument("--own-tokens", type=int, default=256)
    return parser.parse_args()


class Run:
    """One model's stages and where each leaves its result."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.name, self.device = args, f"tiny-{args.model}", args.device
        self.folder, self.work = args.out / self.name, args.out / "work" / self.name
        self.work.mkdir(parents=True, exist_ok=True)
        self.report_path = args.out / f"{self.name}.json"
        self.report = json.loads(self.report_path.read_text()) if self.report_path.exists() else {}

    def note(self, **facts) -> None:
        self.report.update(facts)
        write_json(self.report_path, self.report)

    def where(self) -> str:
        return torch.cuda.get_device_name() if self.device == "cuda" else "CPU"

    def corpus(self) -> None:
        self.stream, self.held, description = load_corpus(
            self.args.out / "corpus", self.args.corpus, VOCAB_SIZE
        )
        self.tokenizer = Tokenizer.from_file(str(self.args.out / "corpus" / "tokenizer.json"))
        self.note(corpus=description)

    def target(self) -> None:
        if (self.folder / "target" / "model.safetensors").exists():
            return
        torch.manual_seed(0)
        model, args = new_target(self.args.model).to(self.device).train(), self.args
        stream = torch.from_numpy(self.stream.astype("int32")).to(self.device)
        outcome = fit(
            f"{self.name} target",
            model,
            lambda step, progress: target_loss(model, stream, args.target_tokens, progress),
            adamw(model, 3e-3, self.device),
            Budget(args.target_steps, args.target_minutes),
            self.work / "target.pt",
            self.device,
        )
        size = write_target(model, args.model, self.tokenizer, self.folder / "target")
        exported = load_target(self.folder / "target").to(self.device)
        held = held_out_loss(exported, torch.from_numpy(self.held.astype("int32")), self.device)
        print(f"[{self.name} target] held-out loss {held}", flush=True)
        self.note(
            target={
                **dataclasses.asdict(outcome),
                "held_out_loss": held,
                "bytes": size,
                "parameters": sum(p.numel() for p in model.parameters()),
                "device": self.where(),
            }
        )

    def own(self) -> None:
        if (self.work / "own.pt").exists():
            return
        torch.manual_seed(1)
        dtype = torch.bfloat16 if self.device == "cuda" else torch.float32
        model, args, started = (
            load_target(self.folder / "target", dtype).to(self.device),
            self.args,
            time.time(),
        )
        made = own_text(model, self.stream, self.device, args.own_groups, args.own_rows, args.own_tokens)
        torch.save(made, self.work / "own.pt")
        self.note(
            own_text={
                "minutes": round((time.time() - started) / 60, 2),
                "tokens": sum(len(text) * args.own_tokens for _, text in made),
            }
        )

    def draft(self) -> None:
        if (self.folder / "draft" / "model.safetensors").exists():
            return
        torch.manual_seed(2)
        args, config = self.args, draft_config(CONFIGS[self.args.model], **DRAFT)
        target = load_target(self.folder / "target").to(self.device).requires_grad_(False)
        drafter = Drafter(config).to(self.device).train()
        stream = torch.from_numpy(self.stream.astype("int32")).to(self.device)
        own = [(length, text.to(self.device)) for length, text in torch.load(self.work / "own.pt")]
        outcome = fit(
            f"{self.name} draft",
            drafter,
            lambda step, progress: drafter_loss(
                drafter, target, stream, own, args.draft_rows, args.draft_blocks, step, self.device
            ),
            muon(drafter, 0.02, self.device),
            Budget(args.draft_steps, args.draft_minutes),
            self.work / "draft.pt",
            self.device,
        )
        size = write_drafter(drafter, config, self.folder / "draft")
        self.note(
            draft={
                **dataclasses.asdict(outcome),
                "bytes": size,
                "parameters": sum(p.numel() for p in drafter.parameters()),
                "device": self.where(),
            }
        )

    def evaluate(self) -> None:
        """Reads only the exported folders and the committed prompts, so it runs wherever they are."""
        target = load_target(self.folder / "target").to(self.device)
        drafter = Drafter(json.loads((self.folder / "draft" / "config.json").read_text()))
        drafter.load_state_dict(
            {k: v.float() for k, v in load_file(self.folder / "draft" / "model.safetensors").items()}
        )
        tokenizer = Tokenizer.from_file(str(self.folder / "target" / "tokenizer.json"))
        prompts = PROMPTS if PROMPTS.exists() else self.args.out / "corpus" / "prompts.json"
        prompts = json.loads(prompts.read_text())
        texts = [greedy_text(target, tokenizer, prompt, drafter.block, self.device) for prompt in prompts]
        texts = [text for text in texts if text.last > text.first]
        result = evaluate(target, drafter.to(self.device).eval(), texts, FEATURE_LAYERS, self.device)
        print(json.dumps(result["accept_length"], indent=1), flush=True)
        shown = [text for text in texts if text.kind == "chat"][:3] + texts[:3]
        samples = [
            {
                "prompt": tokenizer.decode(text.ids[: text.first], skip_special_tokens=False),
                "text": tokenizer.decode(text.ids[text.first : text.last]),
            }
            for text in shown
        ]
        self.note(
            evaluation={
                **result,
                "new_tokens": EVALUATED_TOKENS,
                "samples": samples,
                "dtype": "float32",
                "device": self.where(),
            }
        )


def greedy_text(target, tokenizer: Tokenizer, prompt: dict, block: int, device: str) -> Text:
    """The prompt's greedy continuation, a block longer than rounds start in it, or up to its end."""
    start = tokenizer.encode(prompt["text"], add_special_tokens=False).ids
    ids = greedy(target, torch.tensor([start], device=device), EVALUATED_TOKENS + block)[0].tolist()
    last = len(start) + EVALUATED_TOKENS
    if END_ID in ids[len(start) :]:  # a server stops there, and so do its rounds
        end = ids.index(END_ID, len(start))
        ids, last = ids[: end + 1], min(last, end)
    return Text(prompt["kind"], ids, len(start), last)


def main() -> None:
    args = parse()
    if args.device == "cpu":
        torch.set_num_threads(1)
    run = Run(args)
    for stage in args.stages.split(","):
        getattr(run, stage)()


if __name__ == "__main__":
    main()
