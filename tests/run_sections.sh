#!/usr/bin/env bash
# Run sections of the tests one after another, go on after one that fails, and name those at the end.
#
#   tests/run_sections.sh lint types ...     each is `make test-NAME`; MAKE names another make
set -uo pipefail
trap 'exit 130' INT

failed=()
for section in "$@"; do
    started=$SECONDS
    echo "== $section"
    if ${MAKE:-make} --no-print-directory "test-$section"; then
        verdict=passed
    else
        verdict=FAILED
        failed+=("$section")
    fi
    echo "== $section: $verdict in $((SECONDS - started)) s"
done
if ((${#failed[@]} > 0)); then
    echo "== failed: ${failed[*]} (of $#, in $SECONDS s)"
    exit 1
fi
echo "== all passed: $* (in $SECONDS s)"
