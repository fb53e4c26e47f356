"""The small models: those that travel with the package, and those that `ddtree models NAME` prepares.

The first have a target and a DFlash drafter each. They exist for tests and demonstrations, on a CPU too:
`python launch/training/train_tiny.py` makes them, docs/tiny-models.md says from what and how good they are.
The second lie in a cache folder, once prepared (docs/smollm2.md).
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from sglang_ddtree_patch.errors import ConfigurationError


@dataclass(frozen=True)
class CatalogEntry:
    """One model. `folder` holds target/ and draft/, both in Hugging Face layout."""

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
        """Bytes of the weight files there are."""
        files = [part / "model.safetensors" for part in (self.target, self.draft)]
        return sum(file.stat().st_size for file in files if file.exists())


DESCRIPTIONS = {
    "tiny-gqa": "Qwen3, 4 query heads on 2 KV heads of 64, 4 layers; drafter block 8",
    "tiny-mla": "DeepSeek V3 attention, latent 512 + 64, 2 heads, 4 dense layers; drafter block 8",
}


PREPARED = {"smollm2": "SmolLM2-135M-Instruct, Llama, 9 query heads on 3 KV heads of 64, 30 layers"}
CACHE_VARIABLE = "DDTREE_CACHE"


def names() -> tuple[str, ...]:
    """The models that travel with the package."""
    return tuple(DESCRIPTIONS)


def prepared_names() -> tuple[str, ...]:
    """The models that have to be prepared first."""
    return tuple(PREPARED)


def entry(name: str) -> CatalogEntry:
    """The model called `name`; an unknown name is refused with the names there are."""
    if name in DESCRIPTIONS:
        return CatalogEntry(name, _models_folder() / name, DESCRIPTIONS[name])
    if name in PREPARED:
        return CatalogEntry(name, cache_folder() / name, PREPARED[name])
    known = ", ".join((*names(), *prepared_names()))
    raise ConfigurationError(f"there is no model named {name!r}; there are: {known}")


def path(name: str) -> Path:
    """The folder holding `target/` and, where there is a drafter, `draft/` of the model called `name`.

    Raises:
        ConfigurationError: no such model, or it has not been prepared.
    """
    model = entry(name)
    if not is_there(model):
        raise ConfigurationError(f"{name} is not prepared yet. Type: ddtree models {name}")
    return model.folder


def is_there(model: CatalogEntry) -> bool:
    """Whether the model can be served now. A prepared folder appears whole or not at all."""
    return (model.target / "config.json").is_file()


def packed_drafter(name: str) -> Path:
    """Where the drafter of a prepared model lies in the package, in packed form; none may be there yet."""
    return _models_folder() / name / "packed"


def cache_folder() -> Path:
    """Where prepared models lie: $DDTREE_CACHE, or ddtree/ in the user's cache folder."""
    if chosen := os.environ.get(CACHE_VARIABLE):
        return _expanded(chosen)
    return _expanded(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "ddtree"


def _expanded(folder: str) -> Path:
    """Raises ConfigurationError where the home folder it names is not known."""
    try:
        return Path(folder).expanduser()
    except RuntimeError as error:
        raise ConfigurationError(
            f"the cache folder {folder} is in no home folder that is known here: "
            f"set {CACHE_VARIABLE} to a folder that is."
        ) from error


def _models_folder() -> Path:
    # Weight files are opened by name in other processes, so a real folder is needed; packages installed
    # by pip always have one.
    return Path(str(resources.files("sglang_ddtree_patch") / "models"))
