"""Kernel times as figures, one for each shape and number of requests: a column of panels a width of the tree.

Above stands the time of one call, whose scale has to hold kernels a hundred times apart, beside what the
device needs at best; below the share of that, on an even scale, where near ones can be told apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from sglang_ddtree_patch.launch.bench.kernel_options import KERNEL_NAMES
from sglang_ddtree_patch.launch.plots.axes import STYLES, Row, group, logarithmic, new_figure, plot, values

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PANEL_INCHES = (2.9, 2.6)
BEST = "best possible"
BEST_STYLE = {"color": "#999999", "linestyle": "-", "marker": ""}


def draw_kernels(rows: Sequence[Row]) -> dict[str, Figure]:
    """Figures by name: the shape, and the requests at once where there are several numbers of them."""
    batches = values(rows, lambda row: row["batch"])
    figures = {}
    for shape, batch in values(rows, lambda row: (row["shape"], row["batch"])):
        chosen = [row for row in rows if (row["shape"], row["batch"]) == (shape, batch)]
        requests = f"{batch} request{'' if batch == 1 else 's'}"
        name = shape if len(batches) == 1 else f"{shape}-x{batch}"
        figures[name] = _draw_shape(chosen, f"{shape}, {requests}")
    return figures


def _draw_shape(rows: Sequence[Row], what: str) -> Figure:
    widths = sorted(values(rows, lambda row: row["rows"]))
    figure, axes = new_figure(2, len(widths), PANEL_INCHES, sharex=True, sharey="row")
    for column, width in enumerate(widths):
        chosen = [row for row in rows if row["rows"] == width]
        _draw_times(axes[0][column], chosen)
        axes[0][column].set_title(f"{width} tree rows", fontsize=10)
        _draw_shares(axes[1][column], chosen)
        axes[1][column].set_xlabel("context (tokens)")
    axes[0][0].set_ylabel("time of one call (us)")
    axes[1][0].set_ylabel("share of the best possible")
    lines = {line.get_label(): line for panel in axes.flat for line in panel.lines}
    figure.legend(lines.values(), lines.keys(), loc="outside lower center", ncols=len(lines), fontsize=8)
    figure.suptitle(what, fontsize=9)
    return figure


def _draw_times(axes: Axes, rows: Sequence[Row]) -> None:
    series = group(rows, lambda row: row["kernel"])
    plot(axes, series, "context", lambda row: row["microseconds"], [style_of(kernel) for kernel in series])
    best = {BEST: list(rows)}
    plot(axes, best, "context", lambda row: row["limit_microseconds"], [BEST_STYLE])
    logarithmic(axes)


def _draw_shares(axes: Axes, rows: Sequence[Row]) -> None:
    series = group(rows, lambda row: row["kernel"])
    plot(axes, series, "context", share_of_the_best, [style_of(kernel) for kernel in series])
    axes.axhline(1, **BEST_STYLE, linewidth=1, label=BEST)
    axes.set_ylim(bottom=0)


def share_of_the_best(row: Row) -> float | None:
    """None for a kernel that was wrong, and so was not timed."""
    return None if row["microseconds"] is None else row["limit_microseconds"] / row["microseconds"]


def style_of(kernel: str) -> dict[str, str]:
    """The same in every panel and figure, whichever kernels stand there."""
    known = KERNEL_NAMES.index(kernel) if kernel in KERNEL_NAMES else len(KERNEL_NAMES)
    return STYLES[known % len(STYLES)]
