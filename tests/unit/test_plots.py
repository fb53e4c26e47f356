"""A results file becomes a figure whose axes, lines and labels are there."""

import json

import pytest

from sglang_ddtree_patch import cli
from sglang_ddtree_patch.launch.plots import axes as plots_axes
from sglang_ddtree_patch.launch.plots import command as plots
from sglang_ddtree_patch.launch.plots.kernel import style_of

HEADER = {"device": "a GPU", "versions": {}, "command": "", "date": "2026-01-02"}


def kernel_row(kernel: str, context: int, microseconds: float | None, **other: object) -> dict:
    return {
        "kernel": kernel, "shape": "gqa", "context": context, "rows": 17, "batch": 1, "page_size": 64,
        "microseconds": microseconds, "limit_microseconds": 10.0, **other,
    }  # fmt: skip


def context_row(algorithm: str, context: int, step: float, fraction: float | None) -> dict:
    return {
        "model": "m", "algorithm": algorithm, "backend": "b", "page_size": 64, "context": context,
        "step_milliseconds": step, "tokens_per_second": 1.0, "accept_length": 0.0, "kv_bytes": 1,
        "limit_fraction": fraction,
    }  # fmt: skip


def serve_row(algorithm: str, width: int, temperature: float, batch: int, rate: float) -> dict:
    return {
        "model": "m", "algorithm": algorithm, "width": width, "temperature": temperature, "batch": batch,
        "tokens_per_second": rate, "accept_length": 0.0, "step_milliseconds": 1.0,
    }  # fmt: skip


def lines(axes) -> dict[str, list[tuple[float, float]]]:
    return {line.get_label(): list(zip(*line.get_data(), strict=True)) for line in axes.lines}


def draw(*rows: dict):
    (figure,) = plots.draw({**HEADER, "rows": list(rows)}).values()
    assert figure.get_suptitle() == "a GPU, 2026-01-02"
    for axes in figure.axes:
        assert (axes.get_xscale(), axes.get_yscale()) == ("log", "log")
        assert [text.get_text() for text in axes.get_legend().get_texts()] == list(lines(axes))
    return figure.axes


def draw_kernels(*rows: dict):
    return plots.draw({**HEADER, "rows": list(rows)})


def test_kernels_show_time_and_share_of_the_best_against_context_in_a_column_a_width():
    (figure,) = draw_kernels(
        kernel_row("ddtree", 65536, 40.0),
        kernel_row("ddtree", 1024, 20.0),
        kernel_row("fa3-prefix", 1024, 10.0),
        kernel_row("fa3-prefix", 65536, None),
        kernel_row("ddtree", 1024, 25.0, rows=9),
    ).values()
    narrow, time, narrow_share, share = figure.axes
    assert [axes.get_title() for axes in (narrow, time)] == ["9 tree rows", "17 tree rows"]
    assert (narrow.get_ylabel(), share.get_xlabel()) == ("time of one call (us)", "context (tokens)")
    best = {"best possible": [(1024, 10), (1024, 10), (65536, 10), (65536, 10)]}
    assert lines(time) == {"ddtree": [(1024, 20), (65536, 40)], "fa3-prefix": [(1024, 10)]} | best
    assert lines(narrow)["ddtree"] == [(1024, 25)]
    assert narrow_share.get_ylabel() == "share of the best possible"
    assert lines(share)["ddtree"] == [(1024, 0.5), (65536, 0.25)]
    assert (time.get_xscale(), time.get_yscale(), share.get_yscale()) == ("log", "log", "linear")
    assert [text.get_text() for text in share.get_xticklabels()] == ["1k", "64k"]
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == ["ddtree", "best possible", "fa3-prefix"]


@pytest.mark.parametrize(
    ("batches", "names"), [([1], ["gqa", "mla"]), ([1, 8], ["gqa-x1", "gqa-x8", "mla-x1", "mla-x8"])]
)
def test_each_shape_and_number_of_requests_is_a_figure_of_a_few_panels(batches, names):
    figures = draw_kernels(
        *(
            kernel_row("ddtree", 1024, 20.0, shape=shape, batch=batch, rows=rows)
            for shape in ("gqa", "mla") for batch in batches for rows in (9, 17, 33, 64)
        )
    )  # fmt: skip
    assert list(figures) == names
    assert {len(figure.axes) for figure in figures.values()} == {8}
    first = next(iter(figures.values()))
    assert first.get_suptitle() == "gqa, 1 request, a GPU, 2026-01-02"


def test_a_kernel_looks_the_same_in_every_figure():
    rows = [kernel_row("ddtree", 1024, 20.0, shape="a"), kernel_row("fa3-prefix", 1024, 9.0, shape="a"),
            kernel_row("fa3-prefix", 1024, 9.0, shape="b")]  # fmt: skip
    looks = [line.get_color() for figure in draw_kernels(*rows).values() for line in figure.axes[0].lines
             if line.get_label() == "fa3-prefix"]  # fmt: skip
    assert looks == [style_of("fa3-prefix")["color"]] * 2


def test_the_command_names_a_figure_by_its_shape(tmp_path, capsys):
    rows = [kernel_row("ddtree", 1024, 20.0, shape=shape) for shape in ("gqa", "mla")]
    (tmp_path / "kernel.json").write_text(json.dumps({**HEADER, "rows": rows}))
    assert cli.main(["bench", "plot", str(tmp_path / "kernel.json")]) == 0
    files = [tmp_path / "kernel-gqa.svg", tmp_path / "kernel-mla.svg"]
    assert capsys.readouterr().out.split() == [str(file) for file in files]
    assert all(file.read_bytes().startswith(b"<?xml") for file in files)


def test_context_shows_step_and_share_for_each_server():
    step, share = draw(
        context_row("plain", 1024, 5.0, 0.1),
        context_row("ddtree", 1024, 6.0, None),
        context_row("ddtree", 4096, 7.0, 0.3),
    )
    assert step.get_ylabel() == "time of one step (ms)"
    assert lines(step)["ddtree (b, page 64)"] == [(1024, 6), (4096, 7)]
    assert share.get_ylabel() == "share of the memory limit"
    assert lines(share)["ddtree (b, page 64)"] == [(4096, 0.3)]


def test_serve_shows_tokens_a_second_in_a_panel_a_temperature():
    cold, warm = draw(
        serve_row("plain", 1, 0.0, 1, 100.0),
        serve_row("ddtree", 16, 0.0, 1, 300.0),
        serve_row("ddtree", 16, 0.0, 8, 900.0),
        serve_row("plain", 1, 0.7, 1, 90.0),
    )
    assert (cold.get_xlabel(), cold.get_ylabel()) == ("requests at once", "tokens a second")
    assert lines(cold) == {"plain": [(1, 100)], "ddtree, 16 rows": [(1, 300), (8, 900)]}
    assert warm.get_title() == "m, temperature 0.7"


def test_names_of_ticks_do_not_touch():
    contexts = [1024, 65536, 131072, 163792]
    assert plots_axes.tick_names(contexts) == ["1k", "64k", "", "160k"]
    assert plots_axes.tick_names([1, 8, 32, 64]) == ["1", "8", "32", "64"]


def test_no_two_lines_of_a_figure_look_alike():
    count = len(plots_axes.STYLES)
    (axes,) = draw(*(serve_row(f"server {number}", 1, 0.0, 1, 1.0) for number in range(count)))
    looks = {(line.get_color(), line.get_linestyle(), line.get_marker()) for line in axes.lines}
    assert len(looks) == count


@pytest.mark.parametrize("ending", ["svg", "png"])
def test_the_command_writes_the_figure_and_says_where(tmp_path, capsys, ending):
    file = tmp_path / "serve.json"
    file.write_text(json.dumps({**HEADER, "rows": [serve_row("plain", 1, 0.0, 1, 100.0)]}))
    output = tmp_path / f"figure.{ending}"
    assert cli.main(["bench", "plot", str(file), "--output", str(output)]) == 0
    assert capsys.readouterr().out.strip() == str(output)
    start = {"svg": b"<?xml", "png": b"\x89PNG"}[ending]
    drawn = output.read_bytes()
    assert drawn.startswith(start)
    assert cli.main(["bench", "plot", str(file), "--output", str(output)]) == 0
    assert output.read_bytes() == drawn, "the same results are the same file"


@pytest.mark.parametrize(
    ("text", "output", "words"),
    [
        ("{}", "x.svg", "holds no results"),
        ('{"device": "d", "date": "d", "rows": []}', "x.svg", "nothing was measured"),
        ('{"device": "d", "date": "d", "rows": [{"a": 1}]}', "x.svg", "cannot be drawn"),
        # What ddtree probe gpu writes has a column of this name too.
        (
            '{"device": "d", "date": "d", "rows": [{"phase": "decode", "limit_fraction": 1}]}',
            "x.svg",
            "cannot be",
        ),
        ('{"device": "d", "date": "d", "rows": ["a"]}', "x.svg", "holds no results"),
        ('{"rows": [{"a": 1}]}', "x.doc", "must be one of"),
        ('{"rows": [{"a": 1}]}', "nowhere/x.svg", "there is no folder"),
    ],
)
def test_what_cannot_be_drawn_is_said(tmp_path, capsys, text, output, words):
    file = tmp_path / "results.json"
    file.write_text(text)
    assert cli.main(["bench", "plot", str(file), "--output", str(tmp_path / output)]) == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    ("data", "words"), [(None, "cannot be read: No such file or directory."), (b"\xff", "is no text")]
)
def test_a_file_that_cannot_be_read_is_one_line(tmp_path, capsys, data, words):
    file = tmp_path / "results.json"
    if data is not None:
        file.write_bytes(data)
    assert cli.main(["bench", "plot", str(file)]) == 2
    assert capsys.readouterr().err.startswith(f"ddtree bench plot: {file} {words}")


def test_a_figure_that_cannot_be_written_is_one_line(tmp_path, capsys):
    file, output = tmp_path / "serve.json", tmp_path / "figure.svg"
    file.write_text(json.dumps({**HEADER, "rows": [serve_row("plain", 1, 0.0, 1, 100.0)]}))
    output.mkdir()
    assert cli.main(["bench", "plot", str(file), "--output", str(output)]) == 1
    assert capsys.readouterr().err == f"ddtree bench plot: {output} cannot be written: Is a directory.\n"


def test_without_matplotlib_it_says_what_to_install(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(plots.importlib.util, "find_spec", lambda name: None)
    assert cli.main(["bench", "plot", str(tmp_path / "x.json")]) == 1
    assert "sglang-ddtree-patch[bench]" in capsys.readouterr().err
