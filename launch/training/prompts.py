"""Prompts to train a drafter on: chat, code, arithmetic and summaries, made from parts; and free text.

The parts (parts_of_prompts.json) combine to more prompts than a run uses. None of these stands in
`launch/bench/prompts*.json`, which drafters are judged by. Free text comes from the Python standard library
and the documentation of installed packages: it is summarised, or simply continued (kind `text`).
"""

from __future__ import annotations

import json
import random
import sysconfig
from pathlib import Path

from corpus import question_and_answers, read_sources, read_topics

SHARES = {"chat": 0.34, "code": 0.24, "arithmetic": 0.2, "summary": 0.14, "text": 0.08}
LONGEST_DOCUMENT = 200_000  # characters

PARTS: dict[str, list[str]] = json.loads((Path(__file__).parent / "parts_of_prompts.json").read_text())


def chat(draw: random.Random) -> str:
    subject, other = draw.sample(PARTS["subjects"], 2)
    tone = draw.choice(PARTS["tones"])
    return draw.choice(PARTS["chat"]).format(
        subject=subject, other=other, person=draw.choice(PARTS["people"]), tone=" " + tone if tone else ""
    )


def code(draw: random.Random) -> str:
    language, task = draw.choice(PARTS["languages"]), draw.choice(PARTS["tasks"])
    wish = draw.choice(PARTS["wishes"])
    return f"{draw.choice(PARTS['code']).format(language=language, task=task)} {wish}".strip()


def arithmetic(draw: random.Random) -> str:
    small, b = draw.randint(2, 12), draw.randint(3, 99)
    return draw.choice(PARTS["arithmetic"]).format(
        name=draw.choice(PARTS["names"]),
        things=draw.choice(PARTS["things"]),
        a=draw.randint(100, 999) if draw.random() < 0.3 else draw.randint(11, 99),
        b=b,
        c=draw.randint(1, 10),
        small=small,
        up=small + draw.randint(3, 8),
        far=b + small * draw.randint(4, 12),
        product=small * draw.randint(3, 40),
        line=small * draw.randint(1, 20) + b,
        percent=5 * draw.randint(1, 19),
        round=50 * draw.randint(2, 40),
    )


def make_prompts(count: int, seed: int = 0, documents: list[str] | None = None) -> list[dict[str, str]]:
    """`count` different prompts, {"kind", "text"}, in shares of SHARES; the same for the same arguments."""
    draw = random.Random(seed)
    documents = read_documents() if documents is None else documents
    makers = {
        "chat": chat,
        "code": code,
        "arithmetic": arithmetic,
        "summary": lambda draw: draw.choice(PARTS["summary"]) + "\n\n" + passage(draw, documents),
        "text": lambda draw: passage(draw, documents, most=900),
    }
    made: dict[str, str] = {}
    kinds = draw.choices(list(SHARES), weights=list(SHARES.values()), k=2 * count)
    for kind in kinds:
        made.setdefault(makers[kind](draw), kind)
        if len(made) == count:
            break
    return [{"kind": kind, "text": text} for text, kind in made.items()]


def passage(draw: random.Random, documents: list[str], most: int = 12_000) -> str:
    """A piece of a document, from a line's beginning; many short ones and some long ones."""
    text = draw.choice(documents)
    length = min(int(300 * (most / 300) ** draw.random()), most)
    start = draw.randrange(max(1, len(text) - length))
    start = text.find("\n", start) + 1 if start else 0
    return text[start : start + length].strip() or text[:length]


def read_documents() -> list[str]:
    """Texts of this Python installation: docstrings, reference pages, installed packages' own pages."""
    paths = sysconfig.get_paths()
    stdlib = Path(paths["stdlib"])
    sources = read_sources(stdlib)
    texts = [answer for name, text in sources.items() for _, answer in question_and_answers(name, text)]
    texts = [text for text in texts if len(text) > 300]
    texts += read_topics(stdlib).values()
    for folder in sorted({paths["purelib"], paths["platlib"]}):
        for pattern in ("**/*.md", "**/*.rst", "*.dist-info/METADATA"):
            for path in sorted(Path(folder).glob(pattern)):
                if path.stat().st_size < LONGEST_DOCUMENT and "licenses" not in path.parts:
                    texts.append(path.read_text(encoding="utf-8", errors="ignore"))
    return [text for text in texts if len(text) > 300]
