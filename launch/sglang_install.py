"""Is SGLang here, and is it a release this package serves on? Answered without importing it."""

import importlib.metadata
import importlib.util
import sys

from sglang_ddtree_patch.contract import SUPPORTED_VERSION
from sglang_ddtree_patch.releases import SUPPORTED_VERSIONS

INSTALL_HINT = f"pip install sglang=={SUPPORTED_VERSION}"


def installed_sglang() -> str | None:
    """Version of the installed SGLang, or None."""
    try:
        return importlib.metadata.version("sglang")
    except importlib.metadata.PackageNotFoundError:
        return None


def require_sglang(command: str) -> bool:
    """Say on stderr what is wrong with the installed SGLang, if anything; True when it will do."""
    found = installed_sglang()
    if found in SUPPORTED_VERSIONS:
        return True
    what = "is not installed" if found is None else f"{found} is installed"
    print(
        f"ddtree {command}: SGLang {what}, and this needs {' or '.join(SUPPORTED_VERSIONS)}. "
        f"Run: {INSTALL_HINT}",
        file=sys.stderr,
    )
    return False


def has_nvidia_gpu() -> bool:
    """Whether torch, which has to be installed, can use one."""
    import torch

    return torch.cuda.is_available()


def has_accelerator() -> bool:
    """Whether torch sees a device other than the CPU; False where torch is not installed."""
    if importlib.util.find_spec("torch") is None:
        return False
    import torch

    return torch.accelerator.is_available()
