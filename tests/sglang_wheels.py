"""Other SGLang releases as their wheels ship them, downloaded once into .cache/ and never installed."""

import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

CACHE = Path(__file__).resolve().parent.parent / ".cache" / "sglang-wheels"


def wheel(version: str) -> Path:
    """The wheel of a release, through pip, so that a mirror or a proxy set up for pip is used."""
    found = sorted(CACHE.glob(f"sglang-{version}-*.whl"))
    if not found:
        CACHE.mkdir(parents=True, exist_ok=True)
        # Aside, as another worker may want the same wheel and must not find half of it.
        with tempfile.TemporaryDirectory(dir=CACHE) as folder:
            command = [
                sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--quiet",
                "--no-deps", "--only-binary", ":all:", "--dest", folder, f"sglang=={version}",
            ]  # fmt: skip
            result = subprocess.run(command, capture_output=True, text=True, timeout=300)
            assert result.returncode == 0, f"these tests need SGLang's wheels:\n{result.stderr}"
            for file in Path(folder).iterdir():
                file.replace(CACHE / file.name)
        found = sorted(CACHE.glob(f"sglang-{version}-*.whl"))
    return found[0]


def unpack(version: str, folder: Path, suffix: str = "") -> Path:
    """Unpack the release's files that end in `suffix` into `folder`, which then holds sglang/."""
    with zipfile.ZipFile(wheel(version)) as archive:
        archive.extractall(folder, [name for name in archive.namelist() if name.endswith(suffix)])
    return folder
