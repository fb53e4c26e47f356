"""Training text: the Python standard library's own sources, read from an installed interpreter.

Nothing is fetched. Two kinds of document come out of it:

- `code`: a source file as it stands;
- `chat`: a question about one function, class or topic and the library's own answer to it (its source,
  its docstring, its reference page), in the turn format of the chat template.

Files named in HELD_OUT never enter training; the evaluation prompts are cut from them.
"""

from __future__ import annotations

import ast
import hashlib
import json
import random
import sysconfig
import textwrap
from pathlib import Path

import numpy as np
from vocabulary import ASSISTANT, BOS, END, SYSTEM, USER, encode_many, train_tokenizer

HELD_OUT = frozenset(
    (
        "asyncio/queues.py",
        "concurrent/futures/thread.py",
        "configparser.py",
        "email/header.py",
        "http/cookies.py",
        "json/decoder.py",
        "logging/handlers.py",
        "queue.py",
        "sched.py",
        "textwrap.py",
        "unittest/case.py",
        "urllib/robotparser.py",
    )
)
# Tests, generated tables and vendored copies: large, repetitive, and not what a reader would ask about.
SKIPPED_FOLDERS = frozenset(
    ("site-packages", "dist-packages", "test", "tests", "idle_test", "encodings", "lib2to3", "pydoc_data")
)
ANSWER_CHARACTERS = 1600
SYSTEM_LINE = "You are a helpful assistant."


def read_sources(root: Path) -> dict[str, str]:
    """Relative path -> text of every ASCII module below `root`, in a fixed order."""
    sources = {}
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        if SKIPPED_FOLDERS & set(relative.parts[:-1]) or path.stat().st_size > 300_000:
            continue
        text = path.read_bytes()
        if text.isascii() and text.strip():
            sources[relative.as_posix()] = text.decode().replace("\t", "    ").replace("\r\n", "\n")
    if not sources:
        raise SystemExit(f"no Python sources under {root}; name a standard library with --corpus")
    return sources


def read_topics(root: Path) -> dict[str, str]:
    """The language reference pages that `help()` prints, topic -> text; empty where not installed."""
    path = root / "pydoc_data" / "topics.py"
    if not path.exists():
        return {}
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "topics":
            pages = ast.literal_eval(node.value)
            return {name: page for name, page in sorted(pages.items()) if page.isascii()}
    return {}


def chat_text(question: str, answer: str, system: str | None = None) -> str:
    """One exchange as the chat template renders it, ending with the end-of-turn token."""
    opening = BOS + (f"{SYSTEM}\n{system}{END}\n" if system else "")
    return f"{opening}{USER}\n{question}{END}\n{ASSISTANT}\n{answer}{END}"


def question_and_answers(name: str, text: str) -> list[tuple[str, str]]:
    """Questions a reader could ask of one module, with the module's own words or code as answers."""
    module = name.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    pairs: list[tuple[str, str]] = []
    lines = text.splitlines()
    try:
        tree = ast.parse(text)
    except SyntaxError:
        return pairs
    if doc := ast.get_docstring(tree):
        pairs.append((f"What is the module {module} for?", doc))
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            signature = f"{node.name}({ast.unparse(node.args)})"
            source = textwrap.dedent("\n".join(lines[node.lineno - 1 : node.end_lineno]))
            pairs.append((f"Write the function {signature}.", source))
            if doc := ast.get_docstring(node):
                pairs.append((f"What does {module}.{node.name} do?", doc))
        elif isinstance(node, ast.ClassDef) and (doc := ast.get_docstring(node)):
            pairs.append((f"What is the class {module}.{node.name}?", doc))
    return [(q, a[:ANSWER_CHARACTERS]) for q, a in pairs if len(q) < 160 and len(a) > 40]


def documents(sources: dict[str, str], topics: dict[str, str], seed: int = 0) -> list[str]:
    """All training documents, shuffled once with a fixed seed."""
    draw = random.Random(seed)
    texts = [f"{BOS}{text}{END}" for text in sources.values()]
    pairs = [pair for name, text in sources.items() for pair in question_and_answers(name, text)]
    for topic, page in topics.items():
        texts.append(f"{BOS}{page}{END}")
        pairs.append((f"Explain {topic}.", page[:ANSWER_CHARACTERS]))
    texts += [chat_text(q, a, SYSTEM_LINE if draw.random() < 0.2 else None) for q, a in pairs]
    draw.shuffle(texts)
    return texts


def held_out_prompts(sources: dict[str, str], count: int = 24, seed: int = 1) -> list[dict[str, str]]:
    """`count` code prompts (about 400 characters, cut at a line) and as many chat questions."""
    draw = random.Random(seed)
    prompts, questions = [], []
    for name in sorted(HELD_OUT & set(sources)):
        text = sources[name]
        for start in sorted(draw.sample(range(max(1, len(text) - 900)), min(4, max(1, len(text) - 900)))):
            start = text.find("\n", start) + 1
            prompts.append({"kind": "code", "source": name, "text": text[start : start + 400]})
        for question, _ in question_and_answers(name, text):
            turn = f"{BOS}{USER}\n{question}{END}\n{ASSISTANT}\n"
            questions.append({"kind": "chat", "source": name, "text": turn})
    return draw.sample(prompts, min(count, len(prompts))) + draw.sample(questions, min(count, len(questions)))


def load_corpus(folder: Path, root: Path | None, vocab_size: int) -> tuple[np.ndarray, np.ndarray, dict]:
    """Token streams (uint16, [tokens]) for training and held-out loss, and the corpus's description.

    Built once and kept under `folder` with the tokenizer, so that every model trained beside it reads
    the same tokens.
    """
    described = folder / "corpus.json"
    if not described.exists():
        folder.mkdir(parents=True, exist_ok=True)
        root = root or Path(sysconfig.get_paths()["stdlib"])
        sources = read_sources(root)
        training = {name: text for name, text in sources.items() if name not in HELD_OUT}
        texts = documents(training, read_topics(root))
        tokenizer = train_tokenizer(texts, vocab_size)
        tokenizer.save(str(folder / "tokenizer.json"))
        held = [f"{BOS}{sources[name]}{END}" for name in sorted(HELD_OUT & set(sources))]
        train_ids, held_ids = encode_many(tokenizer, texts), encode_many(tokenizer, held)
        np.save(folder / "train.npy", train_ids)
        np.save(folder / "held.npy", held_ids)
        (folder / "prompts.json").write_text(json.dumps(held_out_prompts(sources), indent=1))
        digest = hashlib.sha256("".join(texts).encode()).hexdigest()
        description = {
            "text": "Python standard library sources and reference pages",
            "characters": sum(map(len, texts)),
            "tokens": len(train_ids),
            "documents": len(texts),
            "sha256": digest,
            "held_out_files": sorted(HELD_OUT & set(sources)),
        }
        described.write_text(json.dumps(description, indent=1))
    return np.load(folder / "train.npy"), np.load(folder / "held.npy"), json.loads(described.read_text())
