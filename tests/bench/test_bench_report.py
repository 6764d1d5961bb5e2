"""Table, JSON and picture in the cases that a good comparison does not have."""

import io
import json
import math

import pytest
from rich.console import Console

from mkor_bench.errors import UserError
from mkor_bench.files import write_atomically
from mkor_bench.report.curves import write_curves
from mkor_bench.report.results import to_json
from mkor_bench.report.table import number, task_table
from mkor_bench.summary import OptimizerResult, TaskResult
from mkor_bench.tasks.source import TaskSource
from mkor_bench.train import Run, Settings

NAN = math.nan


def result(name, *curves, grid=None):
    runs = [
        Run(Settings(name, 0.1, seed, len(losses)), losses, [0.1 * i for i in range(len(losses))])
        for seed, losses in enumerate(curves)
    ]
    return OptimizerResult(name, grid or {0.01: 3.0, 0.1: 1.0, 1.0: 2.0}, {0.1: runs}, 0.001, 1.0)


def shown(*optimizers, width=80):
    of_task = TaskResult(TaskSource("digits-classifier").load(), 4, list(optimizers))
    console = Console(width=width, record=True, file=io.StringIO())
    console.print(task_table(of_task, width))
    return console.export_text()


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0.000"),
        (0.97654321, "0.9765"),
        (21.4941, "21.49"),
        (1234.5, "1234"),
        (0.000468, "4.68e-04"),
        (math.inf, "–"),
    ],
)
def test_numbers_are_short(value, text):
    assert number(value) == text


def test_a_spread_has_two_digits_and_the_mean_as_many_decimals():
    assert " 2.0±1.4 " in shown(result("sgd", [4.0, 1.0], [4.0, 3.0]))


def test_an_edge_of_the_grid_is_marked_and_explained():
    text = shown(result("sgd", [2.0, 1.0], grid={0.1: 1.0, 1.0: 2.0}))
    assert "0.1 †" in text
    assert "† at the edge of the grid" in text
    assert "†" not in shown(result("sgd", [2.0, 1.0]))


@pytest.mark.parametrize(("width", "left_out"), [(80, False), (56, True), (34, True)])
def test_a_narrow_terminal_loses_columns_and_no_digits(width, left_out):
    edge = {0.01: 3.0, 0.1: 1.0}
    one = result("sgd", [4.0, 1.23, 1.2345], [4.0, 1.3, 1.2355], grid=edge)
    two = result("mkor-adamw", [4.0, 1.23, 12345.0], [4.0, 1.3, 12346.0], grid=edge)
    text = shown(one, two, width=width)
    assert "…" not in text
    assert "1.23500±0.00071" in text and "12345.50±0.71" in text
    assert ("Left out" in text) == left_out
    assert all(len(line) <= width for line in text.splitlines())


def test_a_comparison_without_first_order_optimizers_says_what_it_lacks():
    text = " ".join(shown(result("mkor", [2.0, 1.0])).split())
    assert "No target: it takes a first-order optimizer (sgd, adamw, lamb) in --optimizers." in text


def test_the_target_is_named_in_the_legend(tmp_path, monkeypatch):
    from matplotlib.axes import Axes

    legends, legend = [], Axes.legend
    monkeypatch.setattr(
        Axes, "legend", lambda *given, **how: legends.append(legend(*given, **how)) or legends[-1]
    )
    task = TaskSource("digits-classifier").load()
    write_curves(tmp_path, [TaskResult(task, 3, [result("sgd", [4.0, 2.0, 1.0])])])
    assert [text.get_text() for text in legends[0].get_texts()][-1] == "best first-order: 1.000"


def test_losers_and_diverged_runs_are_told_as_they_are():
    text = shown(
        result("sgd", [4.0, 1.0]),
        result("mkor", [4.0, 2.0]),
        result("mkor-adamw", [4.0, NAN], [4.0, 2.0]),
    )
    assert "Target: 1.000, the best first-order loss (sgd). No other optimizer" in text
    assert "diverged (1 of" in text


def test_json_has_no_nan_and_keeps_lists_of_numbers_on_a_line():
    text = to_json({"curve": [1.5, NAN, math.inf], "name": "x[1,  2]", "rows": [{"a": 1}]})
    assert json.loads(text) == {"curve": [1.5, None, None], "name": "x[1,  2]", "rows": [{"a": 1}]}
    assert '"curve": [1.5, null, null]' in text


def test_the_picture_is_drawn_without_warnings_when_runs_diverged(tmp_path):
    task = TaskSource("digits-classifier").load()
    nothing = OptimizerResult("sgd", {0.1: math.inf})
    odd = [
        result("sgd", [4.0, 1e30, NAN]),
        result("adamw", [NAN]),
        result("mkor", [4.0, 2.0, 1.0]),
        nothing,
    ]
    write_curves(tmp_path, [TaskResult(task, 3, odd), TaskResult(task, 3, [nothing])])
    assert (tmp_path / "curves.png").stat().st_size > 10_000


def test_a_file_that_cannot_be_finished_leaves_the_old_one(tmp_path):
    path = tmp_path / "results.json"
    write_atomically(path, lambda p: p.write_text("old"))

    def fail(temporary):
        temporary.write_text("ha")
        raise OSError("disk full")

    with pytest.raises(
        UserError, match=r"results.json' cannot be written \(disk full\): make room"
    ):
        write_atomically(path, fail)
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]
