"""``mkor compare`` from end to end, on tasks that take a moment."""

import json
import logging
import math
import struct

from mkor_bench.compare import TUNING_SEED, Plan, RunJob, compare, run_job
from mkor_bench.report.events import FOLDER_NAME
from mkor_bench.tasks.source import TaskSource
from mkor_bench.train import Settings, Training, train
from mkor_bench.workers import Workers


def test_it_prints_a_table_and_where_the_files_are(compared):
    result, _ = compared
    lines = result.stderr.splitlines()
    assert lines[:2] == ["digits-autoencoder: loading data …", "digits-classifier: waiting …"]
    assert "digits-autoencoder: 100 %, step time" in lines
    assert sum(line.startswith("digits-autoencoder: ") for line in lines) <= 1 + 3 + 10
    for text in ("digits-autoencoder", "digits-classifier", "mkor", "±", "Target:", "×1.00"):
        assert text in result.stdout
    assert "Written to runs/digits: results.json, curves.png" in result.stdout


def test_results_hold_conditions_curves_and_conclusions(compared):
    _, folder = compared
    results = json.loads((folder / "results.json").read_text())
    assert results["machine"]["cores"] >= 1
    assert {"python", "torch", "mkor"} <= set(results["versions"])
    assert results["seeds"] == [0, 1]
    assert results["tuning_seed"] == TUNING_SEED
    assert list(results["tasks"]) == ["digits-autoencoder", "digits-classifier"]
    for task in results["tasks"].values():
        assert task["best_first_order"]["optimizer"] == "sgd"
        assert list(task["optimizers"]) == ["sgd", "mkor"]
        for optimizer in task["optimizers"].values():
            assert [row["lr"] for row in optimizer["grid"]] == [0.01, 0.1]
            assert {row["lr"] for row in optimizer["finalists"]} == {0.01, 0.1}
            best = min(optimizer["finalists"], key=lambda row: row["final_loss"]["mean"])
            assert optimizer["lr"] == best["lr"]
            assert optimizer["final_loss"] == best["final_loss"]
            assert optimizer["step_time_relative_to_sgd"] > 0
            assert [run["seed"] for run in optimizer["runs"]] == [0, 1]
            for run in optimizer["runs"]:
                assert len(run["loss"]) == len(run["seconds"]) == 12
                assert run["seconds"] == sorted(run["seconds"])
        assert task["optimizers"]["sgd"]["step_time_relative_to_sgd"] == 1


def test_the_picture_and_the_events_are_there(compared):
    _, folder = compared
    png = (folder / "curves.png").read_bytes()
    assert png.startswith(b"\x89PNG")
    width, height = struct.unpack(">II", png[16:24])
    assert width > 1000 and height > 800
    events = sorted((folder / FOLDER_NAME).glob("*/*/*/events.out.tfevents.*"))
    assert len(events) == 2 * 2 * 2
    assert not list(folder.glob(".*"))


def test_a_second_comparison_replaces_the_first_ones_events(mkor, tiny, tmp_path):
    for _ in range(2):
        result = mkor("compare", f"{tiny}:task", "--optimizers", "sgd", "--seeds", 1)
        assert result.exit_code == 0
    folder = tmp_path / "runs/tiny" / FOLDER_NAME
    assert len(list(folder.rglob("events.out.tfevents.*"))) == 1


def test_optimizers_of_a_seed_begin_with_the_same_loss(compared):
    _, folder = compared
    results = json.loads((folder / "results.json").read_text())
    for task in results["tasks"].values():
        first = [
            [run["loss"][0] for run in optimizer["runs"]]
            for optimizer in task["optimizers"].values()
        ]
        assert first[0] == first[1]
        assert len(set(first[0])) == 2


def test_divergence_is_told_and_does_not_end_the_comparison(mkor, tiny, tmp_path):
    result = mkor("compare", f"{tiny}:task", "--optimizers", "sgd", "--lrs", "1e30")
    assert result.exit_code == 0
    assert "diverged" in result.stdout
    assert "No target" in result.stdout
    results = json.loads((tmp_path / "runs/tiny/results.json").read_text())
    sgd = results["tasks"]["tiny"]["optimizers"]["sgd"]
    assert sgd["lr"] is None
    assert sgd["grid"] == [{"lr": 1e30, "final_loss": None}]
    assert sgd["runs"] == []


def test_progress_adds_up_and_workers_change_no_result(tiny):
    source = TaskSource(f"{tiny}:task")
    plan = Plan((source,), ("sgd",), seeds=1, lrs=(0.01, 0.1), steps=10)
    curves = []
    for count in (1, 2):
        made = []
        with Workers(count, threads=1) as workers:
            results = compare(plan, workers, lambda *told, made=made: made.append(told[1]))
        assert sum(made) == plan.total_steps(source)
        curves.append(results[0].optimizers[0].runs[0].losses)
    assert curves[0] == curves[1]


def test_a_run_that_diverges_stops(tiny):
    task = TaskSource(f"{tiny}:task").load()
    run = train(Training(task, Settings("sgd", 1e30, seed=0, steps=20)))
    assert run.diverged and run.step < 20
    assert not math.isfinite(run.losses[-1])
    assert run.metric is None


def test_faults_of_a_run_are_not_logged_among_the_progress(caplog, monkeypatch):
    def faulty(training, on_step):
        logging.getLogger("mkor").warning("fault: step=3")
        return training.run

    monkeypatch.setattr("mkor_bench.compare.train", faulty)
    settings = Settings("sgd", 0.1, 0, 40)
    run_job(RunJob(TaskSource("digits-classifier", quick=True), settings), lambda steps: None)
    assert not caplog.records
    logging.getLogger("mkor").warning("fault: later")  # as it was before
    assert [record.getMessage() for record in caplog.records] == ["fault: later"]
