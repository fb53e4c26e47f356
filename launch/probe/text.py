"""The two texts of a probe, at any length: one sentence over and over, and prose that never repeats itself.

Lengths are asked for in tokens and made in characters, since any server takes text but not every one
tokenizes for others. How many characters a token has is learnt from what the server says it got.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from typing import Protocol

from sglang_ddtree_patch.errors import ConfigurationError
from sglang_ddtree_patch.launch.bench.models import ordinary_tokens
from sglang_ddtree_patch.launch.doctor.models import ModelConfig
from sglang_ddtree_patch.launch.probe.answer import Prompt, ask
from sglang_ddtree_patch.launch.probe.prose import CLOSING, PARTS, PATTERNS
from sglang_ddtree_patch.launch.probe.server import ServerFacts
from sglang_ddtree_patch.launch.sglang_client import SGLangClient

PREDICTABLE, PROSE = "predictable", "prose"
KINDS = (PREDICTABLE, PROSE)
SENTENCE = "The keeper lights the lamp, counts the boats in the bay, and writes the number in the book. "
SEED = 0
PARAGRAPH_SENTENCES = 6
# Until the server has said how long its tokens are.
FIRST_CHARACTERS_A_TOKEN = 3.0
# Of a first request. A token has at least one character, so that as many characters fit as tokens do.
FIRST_CHARACTERS = 4000


class PromptMaker(Protocol):
    """Makes prompts of about so many tokens; a shorter one's beginning is that of a longer one."""

    def make(self, tokens: int) -> Prompt: ...

    def learn(self, prompt: Prompt, tokens: int) -> None: ...

    def learn_length(self, client: SGLangClient, shortest: int) -> None: ...


class TextMaker:
    """Makes a kind of text of about so many tokens.

    salt: stands first, so that nothing of the prompt is in a prefix cache from an earlier probe.
    """

    def __init__(self, kind: str, salt: str = ""):
        self._salt = salt
        self._make = repeated_sentence if kind == PREDICTABLE else prose
        self._characters_a_token = FIRST_CHARACTERS_A_TOKEN

    def make(self, tokens: int) -> str:
        return self._make_characters(int(tokens * self._characters_a_token))

    def learn(self, prompt: Prompt, tokens: int) -> None:
        """The server counted so many tokens in this text."""
        self._characters_a_token = len(prompt) / tokens

    def learn_length(self, client: SGLangClient, shortest: int) -> None:
        """Have the server count the tokens of two texts, the second near the shortest length wanted."""
        first = self._make_characters(min(FIRST_CHARACTERS, shortest))
        self.learn(first, ask(client, first, 1).meta["prompt_tokens"])
        second = self.make(int(0.8 * shortest))
        self.learn(second, ask(client, second, 1).meta["prompt_tokens"])

    def _make_characters(self, characters: int) -> str:
        return self._salt + self._make(max(1, characters - len(self._salt)))


class TokenMaker:
    """Random tokens, for a server without a tokenizer."""

    def __init__(self, vocabulary: int, seed: int):
        self._vocabulary, self._seed = vocabulary, seed

    def make(self, tokens: int) -> list[int]:
        return ordinary_tokens(self._vocabulary, tokens, self._seed)

    def learn(self, prompt: Prompt, tokens: int) -> None:
        """There is nothing to learn: a token is a token."""

    def learn_length(self, client: SGLangClient, shortest: int) -> None:
        """Nor here; the server is warmed."""
        ask(client, self.make(shortest)[::-1], 1)


def prompt_maker(facts: ServerFacts, target: ModelConfig | None) -> PromptMaker:
    """Prompts that are in no prefix cache yet: prose, or tokens where the server takes no text.

    Raises:
        ConfigurationError: tokens are needed, and the vocabulary is not known.
    """
    now = int(time.time())
    if facts.takes_text:
        return TextMaker(PROSE, salt=f"Probe {now}. ")
    if target is None:
        raise ConfigurationError(
            f"{facts.url} takes no text, and its vocabulary is not known: name the target's config with "
            "--model."
        )
    return TokenMaker(target.count("vocab_size"), seed=now)


def repeated_sentence(characters: int) -> str:
    """Whole sentences, at least one."""
    return (SENTENCE * max(1, characters // len(SENTENCE))).rstrip()


def prose(characters: int) -> str:
    """Paragraphs of sentences no two alike, then a closing passage, the same at every length.

    What is generated goes on from that passage, so that lengths are compared on the same words. Where it does
    not fit, it stands alone and loses its beginning.
    """
    kept = CLOSING[-characters:]
    body: list[str] = []
    room = characters - len(kept)
    for sentence in _sentences():
        room -= len(sentence) + 1
        if room < 0:
            break
        ends_paragraph = len(body) % PARAGRAPH_SENTENCES == PARAGRAPH_SENTENCES - 1
        body.append(sentence + ("\n" if ends_paragraph else " "))
    return "".join(body) + kept


def _sentences() -> Iterator[str]:
    """Sentences without end and without repetition, the same ones every time."""
    choose = random.Random(SEED).choice
    said = set()
    while True:
        words = {part: choose(options) for part, options in PARTS.items()}
        sentence = choose(PATTERNS).format(**words)
        if sentence not in said:
            said.add(sentence)
            yield sentence[0].upper() + sentence[1:]


def repeated_part(generated: str) -> float:
    """How much of generated text, from its start, goes on repeating the sentence: 0 to 1."""
    flat = " ".join(generated.split())
    if not flat:
        return 0.0
    expected = SENTENCE * (len(flat) // len(SENTENCE) + 2)
    length = 0
    while length < len(flat) and flat[: length + 1] in expected:
        length += 1
    return length / len(flat)
