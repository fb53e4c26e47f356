"""What the demo shows, on a terminal and elsewhere."""

import io

from sglang_ddtree_patch.launch.demo_view import Comparison, DemoView, shorten


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def show_two_rounds(out: io.StringIO) -> str:
    view = DemoView(out)
    view.start_text("def ")
    view.round("main(")
    view.round("):")
    view.end_text()
    return out.getvalue()


def test_rounds_stand_in_brackets_where_there_is_no_terminal():
    assert show_two_rounds(io.StringIO()) == "def [main(][):]\n\n"


def test_neighbouring_rounds_differ_in_colour_on_a_terminal(monkeypatch):
    monkeypatch.delenv("NO_COLOR", raising=False)
    shown = show_two_rounds(Terminal())
    assert "\033[36mmain(" in shown
    assert "\033[33m):" in shown


def test_no_color_is_honoured_on_a_terminal(monkeypatch):
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\033[3" not in show_two_rounds(Terminal())


def test_progress_overwrites_itself_on_a_terminal_and_is_rare_elsewhere():
    terminal, pipe = Terminal(), io.StringIO()
    for out in (terminal, pipe):
        view = DemoView(out)
        for second in range(5):
            view.progress(f"{second} s")
    assert "\n" not in terminal.getvalue()
    assert pipe.getvalue() == "0 s\n"


def test_the_table_says_tokens_a_forward_and_which_text_differs():
    out = io.StringIO()
    DemoView(out).table(
        [
            Comparison("first\n  prompt", tokens=30, plain_forwards=30, tree_forwards=10, is_equal=True),
            Comparison("second", tokens=8, plain_forwards=8, tree_forwards=8, is_equal=False),
        ]
    )
    _, first, second = out.getvalue().splitlines()
    assert first.split() == ["first", "prompt", "30", "30", "10", "3.00", "yes"]
    assert second.split() == ["second", "8", "8", "8", "1.00", "NO"]


def test_a_long_prompt_is_cut_to_the_column():
    assert shorten("a" * 40, 30) == "a" * 27 + "..."
