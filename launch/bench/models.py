"""What a benchmark serves: a target, its drafter, and prompts of that vocabulary."""

from __future__ import annotations

import json
import random
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from sglang_ddtree_patch import model_catalog
from sglang_ddtree_patch.errors import ConfigurationError
from sglang_ddtree_patch.launch.doctor.models import ModelConfig, read_config
from sglang_ddtree_patch.launch.model_shapes import DUMMY_FLAGS, SHAPES, write_shape
from sglang_ddtree_patch.launch.serve import named_flags
from sglang_ddtree_patch.settings import DEFAULT_DRAFT_BLOCK

LAUNCH = Path(__file__).parent.parent
# Names of --prompt-set, and the files it asks from.
PROMPT_SETS = {
    "short": (LAUNCH / "bench" / "prompts.json",),
    "all": (LAUNCH / "bench" / "prompts.json", LAUNCH / "bench" / "prompts_more.json"),
}
# Text that neither committed model was trained on, already in their chat template.
HELD_OUT_PROMPTS = LAUNCH / "training" / "held_out_prompts.json"
# All memory would be tens of millions of KV slots of these, far more than any server has.
COMMITTED_MODEL_FLAGS = ("--max-total-tokens", "65536")
# Random tokens are taken from these where a config alone is given: special tokens stand at either end.
ORDINARY_TOKENS = (0.01, 0.95)  # of the vocabulary


@dataclass(frozen=True)
class Subject:
    """The models under test."""

    name: str  # as rows call it
    target: str  # folder or Hugging Face name
    draft: str
    flags: tuple[str, ...] = ()  # that these models need of SGLang

    def target_config(self) -> ModelConfig:
        return read_config(self.target)

    def draft_config(self) -> ModelConfig:
        return read_config(self.draft)

    @property
    def draft_block(self) -> int:
        """Positions the drafter was trained to propose, root included: what a DFLASH chain verifies."""
        return self.draft_config().drafting.get("block_size", DEFAULT_DRAFT_BLOCK)


def choose_subject(model: str, draft: str | None, name: str | None, folder: Path) -> Subject:
    """The models that `--model` and `--draft` name; configs of shapes are written below the folder.

    Raises:
        ConfigurationError: a drafter is missing, or one is given where it has no place.
    """
    if model in model_catalog.prepared_names():
        folder = model_catalog.path(model)
        if draft is None and not (folder / "draft" / "config.json").is_file():
            raise ConfigurationError(f"--model {model} has no drafter yet: add --draft PATH.")
        return Subject(name or model, str(folder / "target"), draft or str(folder / "draft"))
    if model in SHAPES or model in model_catalog.names():
        if draft is not None:
            raise ConfigurationError(f"--model {model} brings its own drafter: leave --draft out.")
        if model in SHAPES:
            write_shape(model, folder)
            return Subject(name or model, str(folder / "target"), str(folder / "draft"), DUMMY_FLAGS)
        entry = model_catalog.entry(model)
        return Subject(name or model, str(entry.target), str(entry.draft), COMMITTED_MODEL_FLAGS)
    if draft is None:
        known = ", ".join((*model_catalog.names(), *model_catalog.prepared_names(), *SHAPES))
        raise ConfigurationError(
            f"--model {model} needs its DFlash drafter: add --draft PATH. Without one there are: {known}."
        )
    subject = Subject(name or Path(model).name, model, draft)
    subject.target_config(), subject.draft_config()  # refused here where one cannot be read
    return subject


def is_random(subject: Subject, flags: Sequence[str]) -> bool:
    """Whether there is no tokenizer, or no model that text would mean something to."""
    given = named_flags((*subject.flags, *flags))
    return "--skip-tokenizer-init" in given or given.get("--load-format") == "dummy"


def random_tokens(subject: Subject, count: int, seed: int) -> list[int]:
    return ordinary_tokens(subject.target_config().count("vocab_size"), count, seed)


def ordinary_tokens(vocabulary: int, count: int, seed: int) -> list[int]:
    """Random tokens of a vocabulary, the same first ones whatever the count."""
    low, high = (int(part * vocabulary) for part in ORDINARY_TOKENS)
    return random.Random(seed).choices(range(low, high), k=count)


def chat_prompts(subject: Subject, count: int, prompt_set: str = "short") -> list[list[int]]:
    """Prompts to answer: one of this package's sets, or the committed models' held-out ones; at most all.

    Each kind of prompt comes in turn, so that a few are of every kind.
    """
    tokenizer = _tokenizer(subject)
    if subject.target in {str(model_catalog.entry(name).target) for name in model_catalog.names()}:
        texts = json.loads(HELD_OUT_PROMPTS.read_text())
        chosen = list(islice(_in_turn(texts), count))
        return [tokenizer.encode(prompt["text"]) for prompt in chosen]
    texts = [prompt for file in PROMPT_SETS[prompt_set] for prompt in json.loads(file.read_text())]
    chosen = list(islice(_in_turn(texts), count))
    return [_chat_tokens(tokenizer, prompt["text"]) for prompt in chosen]


def _chat_tokens(tokenizer, text: str) -> list[int]:
    if tokenizer.chat_template is None:
        return tokenizer.encode(text)
    conversation = [{"role": "user", "content": text}]
    rendered = tokenizer.apply_chat_template(conversation, tokenize=False, add_generation_prompt=True)
    return tokenizer.encode(rendered, add_special_tokens=False)


def _in_turn(prompts: Sequence[dict]) -> Iterator[dict]:
    """One of each kind, then the next of each kind, for as long as there are any."""
    kinds: dict[str, list[dict]] = {}
    for prompt in prompts:
        kinds.setdefault(prompt["kind"], []).append(prompt)
    for index in range(max(map(len, kinds.values()))):
        yield from (members[index] for members in kinds.values() if index < len(members))


def long_text(subject: Subject, count: int) -> list[int]:
    """`count` tokens of Python's standard library: text that every machine has, in the longest lengths."""
    tokenizer = _tokenizer(subject)
    tokens: list[int] = []
    for file in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        tokens += tokenizer.encode(file.read_text(encoding="utf-8"), add_special_tokens=False)
        if len(tokens) >= count:
            return tokens[:count]
    raise ConfigurationError(f"the standard library has {len(tokens)} tokens, not {count}: lower --contexts.")


def _tokenizer(subject: Subject):
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(subject.target)
    except (OSError, ValueError) as error:
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ConfigurationError(
            f"{subject.target}: no tokenizer can be read there ({first}). Give a model that has one, or add "
            "--load-format dummy for random weights and prompts."
        ) from error
