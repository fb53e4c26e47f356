"""Fuzzed input of `ddtree patch`: any bytes are a diff or an error in words, never a wrong file."""

import difflib

from hypothesis import example, given, settings
from hypothesis import strategies as st

from sglang_ddtree_patch.patches.unified_diff import DiffSyntaxError, FileDiff, parse

# What a diff is made of, so that random bytes get past its first line.
PIECES = [
    b"--- a/x\n", b"+++ b/x\n", b"--- ", b"+++ ", b"a/", b"b/", b"@@ -1 +1 @@\n", b"@@ -1,2 +1,3 @@",
    b"@@ -0,0 +1 @@\n", b"-", b"+", b" ", b"line\n", b"\\ No newline at end of file\n", b"\r\n", b"\r",
    b"\n", b"\xff", b"\x00", b"9" * 5000,
]  # fmt: skip
LINE = st.sampled_from(
    [b"a\n", b"b\n", b"  return 1\n", b"\n", b"x\r\n", b"x\ry\n", b"\xff\x0c\n", b"+++ b/x\n"]
)
FILE = st.lists(LINE, max_size=12)


@settings(max_examples=400, deadline=None)
@given(st.one_of(st.binary(max_size=200), st.lists(st.sampled_from(PIECES), max_size=12).map(b"".join)))
@example(b"--- a/\xff\n+++ b/\xff\n@@ -1 +1 @@\n-a\n+b\n")
@example(b"--- a/x\n+++ b/x\n@@ -" + b"9" * 5000 + b" +1 @@\n-a\n+b\n")
def test_any_bytes_are_a_diff_or_a_syntax_error(text):
    try:
        files = parse(text)
    except DiffSyntaxError:
        return
    for file in files:
        applied_or_refused(file, b"a\nb\nline\n")


def applied_or_refused(file: FileDiff, data: bytes) -> bytes | None:
    try:
        return file.apply(data)
    except ValueError:
        return None


@settings(max_examples=400, deadline=None)
@given(before=FILE, after=FILE, context=st.integers(0, 3))
@example(before=[b"a\n", b"b\n"], after=[b"a\n", b"b\n", b"a\n"], context=0)
@example(before=[b"x\ry\n"], after=[b"x\ry\n", b"a\n"], context=3)
def test_a_diff_of_two_files_leads_from_either_to_the_other(before, after, context):
    file = diff_of(before, after, context)
    if file is not None:
        assert file.apply(b"".join(before)) == b"".join(after)
        assert file.reversed().apply(b"".join(after)) == b"".join(before)


@settings(max_examples=400, deadline=None)
@given(before=FILE, after=FILE, other=FILE)
def test_another_file_is_refused_or_keeps_all_that_the_diff_does_not_name(before, after, other):
    file = diff_of(before, after, context=3)
    if file is not None:
        found = applied_or_refused(file, b"".join(other))
        if found is not None:
            assert file.reversed().apply(found) == b"".join(other)


def diff_of(before: list[bytes], after: list[bytes], context: int) -> FileDiff | None:
    names = {"fromfile": b"a/x", "tofile": b"b/x", "n": context}
    lines = list(difflib.diff_bytes(difflib.unified_diff, before, after, **names))
    return parse(b"".join(lines))[0] if lines else None
