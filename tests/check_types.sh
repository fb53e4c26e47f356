#!/usr/bin/env bash
# Check types with mypy, whose settings are in pyproject.toml: tests/check_types.sh [MYPY]
#
# kernels/, patches/ and launch/ are imported as sglang_ddtree_patch.kernels and so on, which mypy cannot know:
# it is shown a folder of links in which they stand there. What is not ours counts as untyped.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

tree=.mypy_cache/tree
rm -rf "$tree"
mkdir -p "$tree/sglang_ddtree_patch"
for path in "$PWD"/sglang_ddtree_patch/* "$PWD"/{kernels,patches,launch}; do
    ln -s "$path" "$tree/sglang_ddtree_patch/"
done
MYPYPATH=$tree "${1:-mypy}" --no-site-packages --package sglang_ddtree_patch
