"""The models that `ddtree demo` knows: where they lie, what they are asked, and how they are asked it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from sglang_ddtree_patch import model_catalog
from sglang_ddtree_patch.errors import ConfigurationError
from sglang_ddtree_patch.launch.int8_rows import PACKED
from sglang_ddtree_patch.launch.sglang_install import has_accelerator

SMALL, TALKING = "tiny-gqa", "smollm2"
# The committed models have seen the Python standard library and little else.
LIBRARY_PROMPTS = (
    "Write the function close(self).",
    "Write the function __repr__(self).",
    "What is the class queue.Queue?",
)
PROMPTS = {
    TALKING: (
        "What is gravity?",
        "Write a Python function that returns the largest number in a list.",
        "A box holds 12 eggs. How many eggs are in 7 boxes?",
    )
}


@dataclass(frozen=True)
class DemoModel:
    """A model that can be served now."""

    name: str
    folder: Path  # holds target/ and draft/
    prompts: tuple[str, ...]

    def turn(self) -> Callable[[str], str]:
        """What renders a question as the first turn of a chat, by the target's own template."""
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(self.folder / "target")
        return lambda prompt: tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}], tokenize=False, add_generation_prompt=True
        )


def names() -> tuple[str, ...]:
    """Models with a drafter, prepared or not."""
    with_drafter = (name for name in model_catalog.prepared_names() if has_packed_drafter(name))
    return (*model_catalog.names(), *with_drafter)


def default_name() -> str:
    """The model that talks where there is a GPU; on a CPU the small one, which answers in seconds there."""
    return TALKING if TALKING in names() and has_accelerator() else SMALL


def has_packed_drafter(name: str) -> bool:
    return (model_catalog.packed_drafter(name) / PACKED).is_file()


def demo_model(name: str, say: Callable[[str], None]) -> DemoModel:
    """The model called ``name``, prepared first if it has to be.

    Raises:
        ConfigurationError: it cannot be prepared.
    """
    if name in model_catalog.prepared_names() and not model_catalog.entry(name).draft.is_dir():
        from sglang_ddtree_patch.launch.smollm2.prepare import prepare

        try:
            prepare("bfloat16", None, say)
        except ConfigurationError as error:
            raise ConfigurationError(f"{error}\nWithout it: ddtree demo --model {SMALL}") from error
    return DemoModel(name, model_catalog.path(name), PROMPTS.get(name, LIBRARY_PROMPTS))
