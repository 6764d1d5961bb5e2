"""The study of defaults: what it runs, what it keeps, and what its report says."""

import inspect
import json
import math
from dataclasses import replace

import pytest

from mkor_bench.optimizers import OPTIMIZERS, settled_options
from mkor_bench.report.section import Verdict
from mkor_bench.studies.defaults import CHOICE, COMPARED, HELD_OUT, SEARCHED, write_report
from mkor_bench.studies.kept import Kept
from mkor_bench.studies.outcome import TaskOutcome, median
from mkor_bench.studies.runs import Place, data_identity, run_piece
from mkor_bench.studies.study import Request
from mkor_bench.summary import OptimizerResult, TaskResult
from mkor_bench.tasks import TASKS
from mkor_bench.tasks.source import TaskSource
from mkor_bench.train import Run, Settings

STUDY = ["study", "defaults", "--quick", "--tasks", "digits-classifier", "--workers", "1"]
STUDY += ["--seeds", "1", "--output", "out", "--optimizers"]


@pytest.fixture(scope="module")
def study(tmp_path_factory, mkor_in):
    """Runs the command in a folder of its own, where a small study has been done already."""
    folder = tmp_path_factory.mktemp("study")

    def run(*arguments):
        with pytest.MonkeyPatch.context() as patch:
            result = mkor_in(folder, patch)(*arguments)
        assert result.exit_code == 0, result.output
        return result, folder / "out"

    run(*STUDY, "sgd,mkor")
    return run


def kept(folder):
    return {path.name: path.stat().st_mtime_ns for path in (folder / "runs").iterdir()}


def test_a_small_study_is_reported(study):
    result, folder = study(*STUDY, "sgd,mkor", "--report")
    assert "Written to out: defaults.json, defaults.md, curves.png" in result.stdout
    content = json.loads((folder / "defaults.json").read_text())
    task, conditions = content["data"]["tasks"]["digits-classifier"], content["conditions"]
    # For each optimizer: its learning rates, a seed at the best, the time of a step.
    rates = [len(optimizer["grid"]) for optimizer in task["optimizers"].values()]
    assert conditions["pieces"] == len(kept(folder)) == sum(rates) + 2 * (1 + 1)
    assert [len(conditions[key]) for key in ("machines", "versions", "sources")] == [1, 1, 1]
    assert content["section"]["verdict"] == Verdict.OPEN.value
    assert task["target"]["optimizer"] == "sgd" and not task["held_out"]
    sgd, mkor = task["optimizers"]["sgd"], task["optimizers"]["mkor"]
    assert sgd["step_gain"] == sgd["time_gain"] == 1
    assert mkor["step_time_relative_to_sgd"] > 0.5
    assert {0.01, 0.03, 0.1} <= {point["lr"] for point in sgd["grid"]}
    best = min(sgd["grid"], key=lambda point: point["final_loss"])
    assert sgd["lr"] == best["lr"]
    text = (folder / "defaults.md").read_text()
    assert "digits-classifier, 60 steps; target" in text and "| mkor | " in text
    assert (folder / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_a_finished_study_runs_nothing_and_grows_by_what_is_new(study):
    before = kept(study(*STUDY, "sgd,mkor")[1])
    after = kept(study(*STUDY, "sgd,mkor,adamw")[1])
    assert before.items() <= after.items()
    assert len(after) >= len(before) + 5
    assert all("adamw" in name for name in after.keys() - before.keys())


def test_a_study_under_autocast_tunes_from_the_rates_that_it_is_given(study):
    _, folder = study(*STUDY, "adamw", "--autocast", "--lrs", "0.003,0.001", "--output", "half")
    content = json.loads((folder.parent / "half/defaults.json").read_text())
    assert content["conditions"]["precision"] == "bfloat16 autocast"
    grid = content["data"]["tasks"]["digits-classifier"]["optimizers"]["adamw"]["grid"]
    rates = [point["lr"] for point in grid]
    assert rates[:2] == [0.001, 0.003] and len(rates) > 2
    records = [json.loads(path.read_text()) for path in (folder.parent / "half/runs").iterdir()]
    assert {record["spec"]["autocast"] for record in records} == {"bfloat16"}


def test_runs_in_other_precisions_are_kept_apart():
    full, half = (Place("digits-classifier", None, True, autocast=on) for on in (False, True))
    assert "autocast" not in full.spec("sgd")
    assert run_piece(full, "sgd", 0.1, 0).key != run_piece(half, "sgd", 0.1, 0).key


def test_a_report_before_anything_is_done_has_empty_tables(study):
    _, folder = study(*STUDY, "lamb", "--report", "--output", ".")
    content = json.loads((folder.parent / "defaults.json").read_text())
    assert content["data"]["tasks"]["digits-classifier"]["optimizers"] == {}


def test_the_study_covers_ten_tasks_and_holds_two_out():
    assert {*CHOICE, *HELD_OUT} <= {*TASKS}
    assert len(HELD_OUT) == 2 and len(CHOICE) == 8 and not {*CHOICE} & {*HELD_OUT}
    assert set(COMPARED) | set(SEARCHED) <= set(OPTIMIZERS)


def test_the_key_of_a_run_follows_what_a_row_of_the_registry_sets(monkeypatch):
    place = Place("digits-classifier", None, quick=True)
    before = run_piece(place, "mkor-lowrank", 0.1, 0)
    assert before.spec["options"]["damping"] == 0.01 and before.spec["options"]["base"] == "_sgd"
    assert run_piece(place, "mkor-lowrank:damping=0.02", 0.1, 0).spec["options"]["damping"] == 0.02
    row = OPTIMIZERS["mkor-lowrank"]
    build = type(row.build)(row.build.func, **{**row.build.keywords, "damping": 0.5})
    monkeypatch.setitem(OPTIMIZERS, "mkor-lowrank", replace(row, build=build))
    assert settled_options("mkor-lowrank")["damping"] == 0.5
    assert run_piece(place, "mkor-lowrank", 0.1, 0).key != before.key


def test_the_key_of_a_run_follows_the_librarys_defaults(monkeypatch):
    import mkor

    place = Place("digits-classifier", None, quick=True)
    before = run_piece(place, "auto", 0.1, 0)
    assert before.spec["options"]["rank"] == inspect.signature(mkor.auto).parameters["rank"].default
    monkeypatch.setattr(mkor, "auto", lambda model, lr=0.1, *, rank=7: None)
    after = run_piece(place, "auto", 0.1, 0)
    assert after.spec["options"] == {"rank": 7}
    assert after.key != before.key


def test_data_is_told_apart_by_its_checksums_and_not_by_its_place(tmp_path):
    first, second, third = (tmp_path / name for name in "abc")
    for folder, content in ((first, "1  x"), (second, "1  x"), (third, "2  x")):
        folder.mkdir()
        (folder / "SHA256SUMS").write_text(content)
    assert data_identity(str(first)) == data_identity(str(second)) != data_identity(str(third))
    assert data_identity(str(tmp_path)) == "folder without checksums"
    assert (data_identity(None), data_identity("hub")) == (None, "hub")


def result(name, *curves, ratio=1.0, lr=0.1):
    """An optimizer with one run for each curve of losses."""
    runs = [
        Run(Settings(name, lr, seed, len(losses)), losses, [1.0] * len(losses), 0.5)
        for seed, losses in enumerate(curves)
    ]
    made = OptimizerResult(name, {lr: curves[0][-1]}, {lr: runs})
    made.step_seconds, made.step_time_ratio = 0.01 * ratio, ratio
    return made


def falling(to, steps=20, by=20):
    """Losses that fall linearly to a value within some steps, and stay."""
    return [max(to, 100 - (100 - to) * (step + 1) / by) for step in range(steps)]


@pytest.fixture
def outcome():
    task = TaskSource("digits-classifier").load()
    results = [
        result("sgd", falling(20), falling(22)),
        result("adamw", falling(40), falling(40)),
        result("mkor", falling(10, by=10), falling(10, by=10), ratio=1.5),
        result("mkor-adamw", falling(60), falling(50), ratio=2.0),
        result("muon", [math.inf], [math.inf]),
    ]
    return TaskOutcome(TaskResult(task, 20, results), {r.optimizer: r.optimizer for r in results})


def test_gains_are_relative_to_what_sets_the_target(outcome):
    sgd, adamw, mkor, behind, diverged = outcome.result.optimizers
    assert outcome.result.target is sgd  # 21 in 20 steps
    assert outcome.steps_to_target(sgd) == 20
    # 100 - 9 n <= 21 at n = 9
    assert outcome.steps_to_target(mkor) == 9
    assert outcome.step_gain(mkor) == pytest.approx(20 / 9)
    assert outcome.seconds_to_target(mkor) == pytest.approx(9 * 1.5 * 0.01)
    assert outcome.time_gain(mkor) == pytest.approx(20 / 9 / 1.5)
    assert outcome.step_gain(adamw) == outcome.time_gain(adamw) == 0
    assert outcome.step_gain(diverged) == 0
    assert [outcome.behind_base(r) for r in (sgd, mkor, behind)] == [False, False, True]


def test_without_a_first_order_optimizer_there_is_no_target(outcome):
    outcome.result.optimizers[:2] = []
    assert math.isnan(outcome.step_gain(outcome.result.optimizers[0]))
    assert not outcome.behind_base(outcome.result.optimizers[1])  # its base was not run


def test_medians_leave_out_what_is_not_known():
    assert median([3.0, math.nan, 1.0]) == 2.0
    assert math.isnan(median([math.nan]))


def test_tasks_held_out_are_reported_apart(outcome, tmp_path):
    apart = replace(outcome, result=TaskResult(replace(outcome.result.task, name="apart"), 20, []))
    apart.result.optimizers += [result("sgd", falling(20)), result("mkor", falling(10, by=5))]
    asked = Request(("digits-classifier", "apart"), ("sgd", "mkor", "muon"), seeds=2)
    written = write_report(asked, [outcome, apart], ["apart"], Kept(tmp_path), tmp_path)
    content = json.loads((tmp_path / "defaults.json").read_text())["data"]
    medians = content["medians"]
    assert medians["choice"]["mkor"]["step_gain"] == pytest.approx(20 / 9)
    assert medians["held_out"]["mkor"]["step_gain"] == pytest.approx(20 / 5)
    assert medians["held_out"]["muon"]["tasks"] == 0
    assert content["tasks"]["apart"]["held_out"]
    text = (tmp_path / "defaults.md").read_text()
    assert text.index("Medians over the tasks;") < text.index("Medians over the tasks held out;")
    assert "| muon | 0.1000 | diverged |" in text
    assert written.section.verdict == Verdict.HOLDS
    assert "mkor needs 2.22 times fewer steps on 1 tasks chosen by" in written.section.reason
