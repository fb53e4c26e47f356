#!/usr/bin/env bash
# The GPU kernels under NVIDIA's compute-sanitizer, on a machine with a GPU: about a minute.
#
#   launch/sanitize.sh                      memcheck and racecheck
#   launch/sanitize.sh initcheck ...        other tools of compute-sanitizer
#   PYTHON=... COMPUTE_SANITIZER=... launch/sanitize.sh
#
# Ends with 1 if a tool finds anything, or if a kernel's result is wrong.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

PYTHON="${PYTHON:-python}"
SANITIZER="${COMPUTE_SANITIZER:-compute-sanitizer}"
if ! command -v "$SANITIZER" >/dev/null; then
    echo "sanitize: $SANITIZER is not there. It comes with the CUDA toolkit: put its bin folder on PATH," >&2
    echo "sanitize: or name the program with COMPUTE_SANITIZER=/path/to/compute-sanitizer." >&2
    exit 1
fi
if ! "$PYTHON" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
    echo "sanitize: $PYTHON sees no NVIDIA GPU, so no kernel would run." >&2
    exit 1
fi
tests=("$PYTHON" -m pytest -q -m gpu -p no:cacheprovider tests/kernels/test_sanitized.py)

# Every tensor an allocation of its own, or reading past one's end would find its neighbour in torch's pool.
export PYTORCH_NO_CUDA_MEMORY_CACHING=1
"${tests[@]}" # compiles the kernels, so that the tools need not watch it
[ $# -gt 0 ] || set -- memcheck racecheck
# Calls that fail without harm, such as asking a driver for what a newer one has, are not errors of kernels.
for tool in "$@"; do
    echo "sanitize: $tool"
    "$SANITIZER" --tool "$tool" --report-api-errors no --error-exitcode 1 "${tests[@]}"
done
