"""Locks of a DDTREE port: told by shape wherever they stand, and everything that only resembles one left."""

from __future__ import annotations

import textwrap

import pytest

from sglang_ddtree_patch.patches.in_tree import Port, _open_locks
from sglang_ddtree_patch.patches.in_tree_locks import Kind, Lock, Unclear, find_locks
from sglang_ddtree_patch.patches.source_edits import Source, SourceError

PAGE, BACKEND = {Kind.PAGE_SIZE}, {Kind.BACKEND}


def source(code: str, path: str = "sglang/srt/x.py") -> Source:
    return Source(path, textwrap.dedent(code).encode())


LOCKS = {
    "a refusal in a branch": ('if a == "DDTREE":\n    if self.page_size != 1:\n        raise X\n', PAGE),
    "a refusal in one test": ("if self.is_ddtree and self.page_size > 1:\n    raise X\n", PAGE),
    "a message alone": ('if page_size != 1:\n    raise X("ddtree wants --page-size 1")\n', PAGE),
    "a word before it": ('if page_size != 1:\n    log("DDTREE!")\n    raise X\n', PAGE),
    "a negated equality": ("if is_ddtree and not (args.page_size == 1):\n    raise X\n", PAGE),
    "a set of sizes": ('if page_size not in (1, None):\n    raise X("DDTREE")\n', PAGE),
    "an assertion": ('assert page_size == 1, "DDTREE needs pages of 1"\n', PAGE),
    "an assertion for one algorithm": ("assert not self.is_ddtree or self.page_size == 1\n", PAGE),
    "a negated assertion": ("assert not (self.is_ddtree and self.page_size != 1)\n", PAGE),
    "a forced page size": ("if is_ddtree:\n    x = 2\n    args.page_size = 1\n", PAGE),
    "in an elif": (
        'if a == "X":\n    x = 1\nelif a == "DDTREE":\n    x = 2\n    if page_size != 1:\n        raise X\n',
        PAGE,
    ),
    "behind a negation": ("if not ddtree:\n    x = 1\nelse:\n    x = 2\n    assert page_size == 1\n", PAGE),
    "behind an inequality": ('if a != "DDTREE":\n    x = 1\nelse:\n    assert page_size == 1\n', PAGE),
    "in a function": ("def check_ddtree(a):\n    x = 1\n    if a.page_size != 1:\n        raise X\n", PAGE),
    "in a class": ("class DDTreeWorker:\n    def f(self):\n        assert self.page_size == 1\n", PAGE),
    "in a try, a with and a match": (
        "def ddtree():\n    try:\n        with a:\n            match b:\n                case 1:\n"
        "                    assert page_size == 1\n    finally:\n        c()\n", PAGE,
    ),
    "a backend": ('if is_ddtree:\n    if attention_backend != "triton":\n        raise X\n', BACKEND),
    "backends": ('if backend not in ("triton", "aiter_triton"):\n    raise X("DDTREE")\n', BACKEND),
    "a backend's class": ("assert not is_ddtree or isinstance(backend, TritonAttnBackend)\n", BACKEND),
    "a backend's class refused": ("if ddtree and not isinstance(b, TritonBackend):\n    raise X\n", BACKEND),
    "a backend's class by name": (
        'if is_ddtree and type(backend).__name__ != "TritonAttnBackend":\n    raise X\n', BACKEND,
    ),
    "a forced backend": (
        'if is_ddtree:\n    if a.attention_backend != "triton":\n        log("no")\n'
        '        a.attention_backend = "triton"\n', BACKEND,
    ),
    "both at once": (
        'if is_ddtree and (page_size != 1 or backend != "triton"):\n    raise X\n', PAGE | BACKEND,
    ),
}  # fmt: skip


@pytest.mark.parametrize(("code", "kinds"), LOCKS.values(), ids=LOCKS)
def test_a_lock_is_found_and_deleted_alone(code, kinds):
    """The code around it stays, and stays valid."""
    original = source(f"before = 1\n{code}after = 1\n")
    (lock,) = find_locks(original)
    assert isinstance(lock, Lock)
    assert lock.kinds == kinds
    _open_locks([lock])
    left = original.result()
    assert left.startswith(b"before = 1\n")
    assert left.endswith(b"after = 1\n")
    assert find_locks(Source(original.path, left)) == []
    assert set(left.splitlines()) - {b"pass"} >= {
        line for line in original.data.splitlines() if line.endswith((b"x = 1", b"x = 2", b"c()"))
    }


OTHERS = {
    "a lock of another algorithm": "if is_eagle:\n    if page_size != 1:\n        raise X\n",
    "the branch of the others": "if is_ddtree:\n    x = 1\nelse:\n    if page_size != 1:\n        raise X\n",
    "a default": "if is_ddtree:\n    if a.page_size is None:\n        a.page_size = 1\n",
    "another size": "if is_ddtree and page_size != 64:\n    raise X\n",
    "another backend": 'if is_ddtree and backend == "triton":\n    raise X\n',
    "work and no refusal": 'if is_ddtree and page_size != 1:\n    y = f("ddtree")\n',
    "a choice": "if is_ddtree and page_size == 1:\n    raise X\n",
    "another number": "if is_ddtree and width != 1:\n    raise X\n",
    "a local name": "if is_ddtree:\n    page_size = 1\n",
}


@pytest.mark.parametrize("code", OTHERS.values(), ids=OTHERS)
def test_what_only_resembles_a_lock_is_none(code):
    assert find_locks(source(code)) == []


UNCLEAR = {
    "another reason to refuse": 'if page_size != 1 or topk > 1:\n    raise X("DDTREE")\n',
    "another thing asserted": 'assert page_size == 1 and topk == 1, "DDTREE"\n',
    "an else": 'if page_size != 1:\n    raise X("DDTREE")\nelse:\n    go()\n',
}


@pytest.mark.parametrize("code", UNCLEAR.values(), ids=UNCLEAR)
def test_a_lock_that_is_more_is_not_deleted_and_is_said(code):
    (found,) = find_locks(source(code))
    assert isinstance(found, Unclear)
    assert str(found).startswith("sglang/srt/x.py, line 1: a lock ")


def test_a_file_named_for_ddtree_speaks_of_it():
    code = "if page_size != 1:\n    raise X\n"
    assert find_locks(source(code)) == []
    assert len(find_locks(source(code, "sglang/srt/speculative/ddtree_info.py"))) == 1


def test_a_block_of_nothing_but_locks_keeps_one_pass():
    code = 'if is_ddtree:\n    assert page_size == 1\n    assert backend == "triton"\nx = 1\n'
    original = source(code)
    _open_locks(find_locks(original))
    assert original.result() == b"if is_ddtree:\n    pass\nx = 1\n"


def test_a_lock_in_an_elif_leaves_the_branches_before_it():
    original = source("if a:\n    x = 1\nelif is_ddtree and page_size != 1:\n    raise X\ny = 1\n")
    _open_locks(find_locks(original))
    assert original.result() == b"if a:\n    x = 1\ny = 1\n"


def test_a_lock_that_shares_its_line_is_not_deleted():
    original = source('x = 1; assert page_size == 1, "DDTREE"\n')
    with pytest.raises(SourceError, match="line 1: another statement shares the line"):
        _open_locks(find_locks(original))


def test_columns_are_counted_in_bytes():
    """Python's are, behind letters of more than one."""
    original = source('if is_ddtree: é = "ü"\nx = verify(é, page_size)\n')
    call = original.tree.body[1].value
    original.replace(call.args[1], "1")
    assert original.result() == 'if is_ddtree: é = "ü"\nx = verify(é, 1)\n'.encode()


def test_a_port_says_what_it_demands():
    port = Port(locks=find_locks(source('assert page_size == 1, "DDTREE"\n')))
    assert port.demands(Kind.PAGE_SIZE)
    assert not port.demands(Kind.BACKEND)
