"""Order and choice of tests: those that start no server come first, GPU tests run where there is a GPU."""

import os

import pytest
import torch

# Without a GPU our Triton kernels run in its interpreter, which Triton must know before it is imported, and
# SGLang's compiled functions run as they stand.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.get_closest_marker("server") is not None)
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="no NVIDIA GPU"))
