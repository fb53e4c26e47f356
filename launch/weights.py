"""Weights as a safetensors file that everybody on this machine may read."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

READABLE = 0o644


def save_weights(weights: Mapping[str, Any], path: Path) -> None:
    """Write tensors by name. safetensors alone leaves a file that only its owner may read."""
    from safetensors.torch import save_file

    save_file(dict(weights), path, metadata={"format": "pt"})
    path.chmod(READABLE)
