"""`ddtree bench plot FILE`: a results file of `ddtree bench` as a figure, SVG or PNG.

What kind of results a file holds is told from its rows:

    kernel     time, and share of the best possible, against context; one line a kernel, a column of panels a
               width of the tree, a figure for each shape and number of requests (kernel.py)
    context    step time, and share of the memory limit, against context; one line an algorithm and backend
    serve      tokens a second against requests at once; one line an algorithm and width, one panel a
               temperature

Lines differ in dash and marker as well as in colour, so that a figure can be read in print.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sglang_ddtree_patch.errors import ConfigurationError
from sglang_ddtree_patch.launch.plots.axes import Row, group, label, new_figure, plot, values
from sglang_ddtree_patch.launch.plots.kernel import draw_kernels

if TYPE_CHECKING:
    from matplotlib.figure import Figure

INSTALL_HINT = "pip install 'sglang-ddtree-patch[bench]'"
FORMATS = (".svg", ".png", ".pdf")
# No date in the file: a figure drawn again from the same results is the same file.
SAME_EVERY_TIME = {".svg": {"Date": None}, ".pdf": {"CreationDate": None}}

_EXAMPLE = """\
example:
  ddtree bench plot launch/results/context-qwen3-8b-h200.json
  ddtree bench plot serve.json --output serve.png
  ddtree bench plot launch/results/kernel-h200.json --output kernel.svg
                                             kernel-gqa-32x8x128.svg and two more
"""


def add_parser(subparsers) -> None:
    parser = subparsers.add_parser(
        "plot",
        help="draw a results file",
        description="Draw a results file of ddtree bench: kernel, serve or context.",
        epilog=_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("file", type=Path, help="what --json wrote")
    parser.add_argument(
        "--output",
        type=Path,
        metavar="FIGURE",
        help=f"{', '.join(FORMATS)} (default: beside FILE, with the ending .svg); kernels get a figure for "
        "each shape, whose name is put before the ending",
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    if importlib.util.find_spec("matplotlib") is None:
        print(f"ddtree bench plot: matplotlib is not installed. Run: {INSTALL_HINT}", file=sys.stderr)
        return 1
    output = arguments.output or arguments.file.with_suffix(".svg")
    try:
        if output.suffix not in FORMATS:
            raise ConfigurationError(f"--output {output}: the ending must be one of {', '.join(FORMATS)}.")
        if not output.parent.is_dir():
            raise ConfigurationError(f"--output {output}: there is no folder {output.parent}.")
        figures = draw(read_results(arguments.file))
    except ConfigurationError as error:
        print(f"ddtree bench plot: {error}", file=sys.stderr)
        return 2
    import matplotlib

    matplotlib.rcParams["svg.hashsalt"] = "ddtree"  # and so are its ids
    for name, figure in figures.items():
        file = output.with_stem(f"{output.stem}-{name}") if name else output
        try:
            figure.savefig(file, dpi=150, metadata=SAME_EVERY_TIME.get(file.suffix))
        except OSError as error:
            print(f"ddtree bench plot: {file} cannot be written: {error.strerror}.", file=sys.stderr)
            return 1
        print(file)
    return 0


def read_results(file: Path) -> dict[str, Any]:
    """Raises ConfigurationError where the file cannot be read or holds no rows."""
    try:
        text = file.read_text()
    except OSError as error:
        raise ConfigurationError(f"{file} cannot be read: {error.strerror}.") from error
    except UnicodeDecodeError as error:
        raise ConfigurationError(f"{file} is no text: give what --json wrote.") from error
    try:
        results = json.loads(text)
        device_and_date(results)
        if results["rows"]:
            results["rows"][0].keys()
            return results
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise ConfigurationError(
            f"{file} holds no results of ddtree bench kernel, serve or context: {error}."
        ) from error
    raise ConfigurationError(f"{file} has no rows: nothing was measured yet.")


def device_and_date(results: Mapping[str, Any]) -> str:
    return f"{results['device']}, {results['date']}"


def draw(results: Mapping[str, Any]) -> dict[str, Figure]:
    """The figures for results of any kind, by what tells them apart: "" where there is one alone.

    Raises:
        ConfigurationError: the rows are of no kind that is known.
    """
    columns = results["rows"][0].keys()
    for named, draw_kind in (
        ({"kernel", "limit_microseconds"}, draw_kernels),
        ({"algorithm", "limit_fraction"}, draw_context),
        ({"algorithm", "temperature"}, draw_serve),
    ):
        if named <= columns:
            figures = draw_kind(results["rows"])
            for figure in figures.values():
                figure.suptitle(
                    ", ".join(filter(None, (figure.get_suptitle(), device_and_date(results)))), fontsize=9
                )
            return figures
    raise ConfigurationError(
        f"rows with the columns {', '.join(columns)} cannot be drawn: "
        "what ddtree bench kernel, serve and context write can be."
    )


def draw_context(rows: Sequence[Row]) -> dict[str, Figure]:
    models = values(rows, lambda row: row["model"])
    figure, axes = new_figure(len(models), 2)
    for (step_axes, share_axes), model in zip(axes, models, strict=True):
        series = group(
            (row for row in rows if row["model"] == model),
            lambda row: f"{row['algorithm']} ({row['backend']}, page {row['page_size']})",
        )
        plot(step_axes, series, "context", lambda row: row["step_milliseconds"])
        label(step_axes, model, "context (tokens)", "time of one step (ms)")
        plot(share_axes, series, "context", lambda row: row["limit_fraction"])
        label(share_axes, model, "context (tokens)", "share of the memory limit")
    return {"": figure}


def draw_serve(rows: Sequence[Row]) -> dict[str, Figure]:
    panels = values(rows, lambda row: (row["model"], row["temperature"]))
    figure, axes = new_figure(len(panels), 1)
    for (panel,), (model, temperature) in zip(axes, panels, strict=True):
        series = group(
            (row for row in rows if (row["model"], row["temperature"]) == (model, temperature)),
            lambda row: row["algorithm"] if row["width"] == 1 else f"{row['algorithm']}, {row['width']} rows",
        )
        plot(panel, series, "batch", lambda row: row["tokens_per_second"])
        label(panel, f"{model}, temperature {temperature:g}", "requests at once", "tokens a second")
    return {"": figure}
