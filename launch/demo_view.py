"""What the demo prints: each round's accepted tokens as they arrive, and the table at the end."""

import os
from dataclasses import dataclass
from typing import TextIO

from sglang_ddtree_patch.launch.terminal import LiveLine

_ROUND_COLOURS = ("\033[36m", "\033[33m")  # cyan and yellow, in turn
_DIM = "\033[2m"
_PLAIN = "\033[0m"


@dataclass(frozen=True)
class Comparison:
    """One prompt, served both ways. Forwards count the target's passes, the prompt's own included."""

    prompt: str
    tokens: int
    plain_forwards: int
    tree_forwards: int
    is_equal: bool

    @property
    def tokens_per_forward(self) -> float:
        return self.tokens / self.tree_forwards


class DemoView(LiveLine):
    """Writes to a terminal with colours, to anything else with brackets around each round."""

    def __init__(self, out: TextIO | None = None):
        super().__init__(out)
        self._has_colour = self.is_terminal and "NO_COLOR" not in os.environ
        self._rounds = 0

    def start_text(self, prompt: str) -> None:
        self._rounds = 0
        self._write(f"{_DIM}{prompt}{_PLAIN}" if self._has_colour else prompt)

    def round(self, text: str) -> None:
        """The text of the tokens one round committed."""
        if self._has_colour:
            self._write(f"{_ROUND_COLOURS[self._rounds % 2]}{text}{_PLAIN}")
        else:
            self._write(f"[{text}]")
        self._rounds += 1

    def end_text(self) -> None:
        self.line("\n")

    def table(self, comparisons: list[Comparison]) -> None:
        row = "{:<30} {:>7} {:>15} {:>16} {:>15}  {}".format
        self.line(row("prompt", "tokens", "plain forwards", "DDTREE forwards", "tokens/forward", "same text"))
        for one in comparisons:
            self.line(
                row(
                    shorten(one.prompt, 30),
                    one.tokens,
                    one.plain_forwards,
                    one.tree_forwards,
                    f"{one.tokens_per_forward:.2f}",
                    "yes" if one.is_equal else "NO",
                )
            )


def shorten(text: str, width: int) -> str:
    """The text on one line, cut to `width`."""
    flat = " ".join(text.split())
    return flat if len(flat) <= width else flat[: width - 3] + "..."
