"""What both tests of `ddtree patch` start from."""

from pathlib import Path

import pytest
from patch_trees import every_tree_serves, write_releases, write_tree

from sglang_ddtree_patch.launch import patch as command
from sglang_ddtree_patch.patches.releases import known_releases


@pytest.fixture
def releases(tmp_path, monkeypatch) -> Path:
    """A made-up release that touches two files, in place of the real diffs."""
    folder = write_releases(tmp_path)
    monkeypatch.setattr(command, "known_releases", lambda: known_releases(folder))
    monkeypatch.setattr(command, "check_releases", every_tree_serves)
    return folder


@pytest.fixture
def root(tmp_path, releases) -> Path:
    return write_tree(tmp_path)
