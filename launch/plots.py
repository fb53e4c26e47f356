"""`ddtree bench plot FILE`: a results file of `ddtree bench` as a figure, SVG or PNG.

What kind of results a file holds is told from its rows:

    kernel     time, and share of the limit, against context; one line a kernel, one figure row a shape and
               number of tree rows
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
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sglang_ddtree_patch.errors import ConfigurationError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INSTALL_HINT = "pip install 'sglang-ddtree-patch[bench]'"
FORMATS = (".svg", ".png", ".pdf")
# Told apart in greyscale and by the colour-blind: colour, dash and marker all change.
STYLES = (
    {"color": "#000000", "linestyle": "-", "marker": "o"},
    {"color": "#0072b2", "linestyle": "--", "marker": "s"},
    {"color": "#d55e00", "linestyle": "-.", "marker": "^"},
    {"color": "#009e73", "linestyle": ":", "marker": "D"},
    {"color": "#cc79a7", "linestyle": "-", "marker": "v"},
    {"color": "#56b4e9", "linestyle": "--", "marker": "x"},
    {"color": "#e69f00", "linestyle": "-.", "marker": "P"},
    {"color": "#666666", "linestyle": ":", "marker": "*"},
)
PANEL_INCHES = (5.2, 3.6)

Row = Mapping[str, Any]

_EXAMPLE = """\
example:
  ddtree bench plot launch/results/context-qwen3-8b-h200.json
  ddtree bench plot serve.json --output serve.png
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
        "--output", type=Path, help=f"{', '.join(FORMATS)} (default: beside FILE, with the ending .svg)"
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
        figure = draw(read_results(arguments.file))
    except ConfigurationError as error:
        print(f"ddtree bench plot: {error}", file=sys.stderr)
        return 2
    figure.savefig(output, dpi=150)
    print(output)
    return 0


def read_results(file: Path) -> dict[str, Any]:
    """Raises ConfigurationError where the file holds no rows."""
    try:
        results = json.loads(file.read_text())
        if results["rows"]:
            return results
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise ConfigurationError(
            f"{file} holds no results of ddtree bench kernel, serve or context: {error}."
        ) from error
    raise ConfigurationError(f"{file} has no rows: nothing was measured yet.")


def draw(results: Mapping[str, Any]) -> Figure:
    """The figure for results of any kind.

    Raises:
        ConfigurationError: the rows are of no kind that is known.
    """
    columns = results["rows"][0].keys()
    for column, draw_kind in (
        ("kernel", draw_kernel),
        ("limit_fraction", draw_context),
        ("algorithm", draw_serve),
    ):
        if column in columns:
            figure = draw_kind(results["rows"])
            figure.suptitle(f"{results['device']}, {results['date']}", fontsize=9)
            return figure
    raise ConfigurationError(
        f"rows with the columns {', '.join(columns)} cannot be drawn: "
        "what ddtree bench kernel, serve and context write can be."
    )


def draw_kernel(rows: Sequence[Row]) -> Figure:
    panels = values(rows, lambda row: (row["shape"], row["rows"], row["batch"]))
    figure, axes = new_figure(len(panels), 2)
    for (time_axes, share_axes), (shape, width, batch) in zip(axes, panels, strict=True):
        chosen = [row for row in rows if (row["shape"], row["rows"], row["batch"]) == (shape, width, batch)]
        chosen = [row for row in chosen if row["microseconds"] is not None]
        series = group(chosen, lambda row: row["kernel"])
        what = f"{shape}, {width} tree rows, batch {batch}"
        plot(time_axes, series, "context", lambda row: row["microseconds"])
        label(time_axes, what, "context (tokens)", "time of one call (us)")
        plot(share_axes, series, "context", lambda row: row["limit_microseconds"] / row["microseconds"])
        label(share_axes, what, "context (tokens)", "share of the limit")
    return figure


def draw_context(rows: Sequence[Row]) -> Figure:
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
    return figure


def draw_serve(rows: Sequence[Row]) -> Figure:
    panels = values(rows, lambda row: (row["model"], row["temperature"]))
    figure, axes = new_figure(len(panels), 1)
    for (panel,), (model, temperature) in zip(axes, panels, strict=True):
        series = group(
            (row for row in rows if (row["model"], row["temperature"]) == (model, temperature)),
            lambda row: row["algorithm"] if row["width"] == 1 else f"{row['algorithm']}, {row['width']} rows",
        )
        plot(panel, series, "batch", lambda row: row["tokens_per_second"])
        label(panel, f"{model}, temperature {temperature:g}", "requests at once", "tokens a second")
    return figure


def new_figure(rows: int, columns: int) -> tuple[Figure, Any]:
    from matplotlib.figure import Figure

    width, height = PANEL_INCHES
    figure = Figure(figsize=(width * columns, height * rows + 0.3), layout="constrained")
    return figure, figure.subplots(rows, columns, squeeze=False)


def values(rows: Iterable[Row], of: Callable[[Row], Any]) -> list[Any]:
    """The different values, in the order they come."""
    return list(dict.fromkeys(map(of, rows)))


def group(rows: Iterable[Row], name: Callable[[Row], str]) -> dict[str, list[Row]]:
    series: dict[str, list[Row]] = {}
    for row in rows:
        series.setdefault(name(row), []).append(row)
    return series


def plot(axes: Axes, series: Mapping[str, list[Row]], x: str, y: Callable[[Row], float | None]) -> None:
    """One line a series; points without a value are left out."""
    for (name, rows), style in zip(series.items(), cycle(STYLES), strict=False):
        points = sorted((row[x], y(row)) for row in rows if y(row) is not None)
        axes.plot([at for at, _ in points], [value for _, value in points], label=name, markersize=4, **style)
    positions = sorted({row[x] for rows in series.values() for row in rows})
    axes.set_xscale("log", base=2)
    axes.set_xticks(positions, [short(position) for position in positions])
    axes.minorticks_off()


def short(count: int) -> str:
    return f"{count / 1024:.3g}k" if count >= 1024 else str(count)


def label(axes: Axes, title: str, x: str, y: str) -> None:
    """Title, names and a logarithmic y axis with its numbers written out at 1, 2 and 5."""
    from matplotlib.ticker import LogLocator, NullLocator

    axes.set_title(title, fontsize=10)
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter("{x:g}")
    axes.tick_params(labelsize=7)
    axes.grid(True, linewidth=0.3)
    axes.legend(fontsize=8)
