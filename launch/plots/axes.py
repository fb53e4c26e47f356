"""What the figures of `ddtree bench plot` share: lines that differ, axes, and rows put together to lines."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import cycle
from typing import TYPE_CHECKING, Any

from sglang_ddtree_patch.launch.token_counts import shown_tokens

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

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
NEAREST_NAMES = 1.4  # of two ticks whose names have room side by side, the right one over the left

Row = Mapping[str, Any]


def new_figure(
    rows: int, columns: int, panel: tuple[float, float] = PANEL_INCHES, **shared: Any
) -> tuple[Figure, Any]:
    from matplotlib.figure import Figure

    width, height = panel
    figure = Figure(figsize=(width * columns, height * rows + 0.3), layout="constrained")
    return figure, figure.subplots(rows, columns, squeeze=False, **shared)


def values(rows: Iterable[Row], of: Callable[[Row], Any]) -> list[Any]:
    """The different values, in the order they come."""
    return list(dict.fromkeys(map(of, rows)))


def group(rows: Iterable[Row], name: Callable[[Row], str]) -> dict[str, list[Row]]:
    series: dict[str, list[Row]] = {}
    for row in rows:
        series.setdefault(name(row), []).append(row)
    return series


def plot(
    axes: Axes,
    series: Mapping[str, list[Row]],
    x: str,
    y: Callable[[Row], float | None],
    styles: Sequence[Mapping[str, str]] = STYLES,
) -> None:
    """One line a series; points without a value are left out."""
    for (name, rows), style in zip(series.items(), cycle(styles), strict=False):
        points = sorted((row[x], y(row)) for row in rows if y(row) is not None)
        axes.plot([at for at, _ in points], [value for _, value in points], label=name, markersize=4, **style)
    positions = sorted({row[x] for rows in series.values() for row in rows})
    axes.set_xscale("log", base=2)
    axes.set_xticks(positions, tick_names(positions))
    axes.minorticks_off()
    axes.tick_params(labelsize=7)
    axes.grid(True, linewidth=0.3)


def tick_names(positions: Sequence[int]) -> list[str]:
    """What stands at each tick of a logarithmic axis; nothing where the name to the right would touch it."""
    behind = (*positions[1:], positions[-1] * 2) if positions else ()
    return [
        shown_tokens(at) if right >= NEAREST_NAMES * at else ""
        for at, right in zip(positions, behind, strict=True)
    ]


def label(axes: Axes, title: str, x: str, y: str) -> None:
    """Title, names, a legend and a logarithmic y axis."""
    axes.set_title(title, fontsize=10)
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    logarithmic(axes)
    axes.legend(fontsize=8)


def logarithmic(axes: Axes) -> None:
    """A logarithmic y axis with its numbers written out at 1, 2 and 5."""
    from matplotlib.ticker import LogLocator, NullLocator

    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter("{x:g}")
