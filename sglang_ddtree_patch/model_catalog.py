"""The small models that travel with the package: a target and a DFlash drafter each.

They exist for tests and demonstrations, on a CPU too. `python launch/training/train_tiny.py` makes them,
docs/tiny-models.md says from what and how good they are.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from sglang_ddtree_patch.errors import ConfigurationError


@dataclass(frozen=True)
class CatalogEntry:
    """One committed model. `folder` holds target/ and draft/, both in Hugging Face layout."""

    name: str
    folder: Path
    description: str

    @property
    def target(self) -> Path:
        return self.folder / "target"

    @property
    def draft(self) -> Path:
        return self.folder / "draft"

    def weight_bytes(self) -> int:
        """Bytes of both weight files."""
        return sum((part / "model.safetensors").stat().st_size for part in (self.target, self.draft))


DESCRIPTIONS = {
    "tiny-gqa": "Qwen3, 4 query heads on 2 KV heads of 64, 4 layers; drafter block 8",
    "tiny-mla": "DeepSeek V3 attention, latent 512 + 64, 2 heads, 4 dense layers; drafter block 8",
}


def names() -> tuple[str, ...]:
    """The names `path` takes."""
    return tuple(DESCRIPTIONS)


def entry(name: str) -> CatalogEntry:
    """The model called `name`; an unknown name is refused with the names there are."""
    if name not in DESCRIPTIONS:
        raise ConfigurationError(
            f"no model named {name!r} comes with sglang-ddtree-patch; there are: {', '.join(names())}"
        )
    return CatalogEntry(name, _models_folder() / name, DESCRIPTIONS[name])


def path(name: str) -> Path:
    """The folder holding `target/` and `draft/` of the model called `name`."""
    return entry(name).folder


def _models_folder() -> Path:
    # Weight files are opened by name in other processes, so a real folder is needed; packages installed
    # by pip always have one.
    return Path(str(resources.files("sglang_ddtree_patch") / "models"))
