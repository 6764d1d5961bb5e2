"""``mkor train``: checkpoints, and runs that continue with the same bits."""

import json
import re
import subprocess
import sys

import pytest
import torch

from mkor_bench.checkpoint import FILE_NAME
from mkor_bench.report.events import FOLDER_NAME


def load(folder):
    return torch.load(folder / FILE_NAME, weights_only=True)


def flatten(value, path=""):
    if isinstance(value, dict):
        return {k: v for key in value for k, v in flatten(value[key], f"{path}/{key}").items()}
    if isinstance(value, (list, tuple)):
        return flatten(dict(enumerate(value)), path)
    return {path: value}


def assert_same_bits(one, other):
    one, other = flatten(one), flatten(other)
    assert one.keys() == other.keys()
    for path, value in one.items():
        if "/seconds" in path or path == "/task":
            continue
        if isinstance(value, torch.Tensor):
            assert value.dtype == other[path].dtype, path
            assert torch.equal(value, other[path]), path
        else:
            assert value == other[path], path


def test_it_writes_a_checkpoint_results_and_events(mkor, tiny, tmp_path):
    result = mkor("train", f"{tiny}:task", "--optimizer", "sgd")
    assert result.exit_code == 0
    lines = result.stderr.splitlines()
    assert len(lines) == 10
    assert re.fullmatch(r"tiny, sgd: 50 %, loss \d\.\d+", lines[4])
    assert "after 20 steps" in result.stdout
    folder = tmp_path / "runs/train/tiny-sgd"
    state = load(folder)
    assert state["step"] == 20 and len(state["losses"]) == 20
    assert state["settings"] == {"optimizer": "sgd", "lr": 0.01, "seed": 0, "steps": 20}
    results = json.loads((folder / "results.json").read_text())
    run = results["tasks"]["tiny"]["optimizers"]["sgd"]["runs"][0]
    assert run["loss"] == state["losses"]
    assert (folder / "curves.png").stat().st_size > 10_000
    assert len(list((folder / FOLDER_NAME).iterdir())) == 1


@pytest.mark.parametrize("optimizer", ["sgd", "adamw", "lamb", "mkor", "mkor-adamw"])
def test_resume_after_a_crash_gives_the_same_bits(mkor, tiny, tmp_path, monkeypatch, optimizer):
    arguments = ("--optimizer", optimizer, "--lr", 0.05, "--checkpoint-every", 5)
    # The task is tried once before a run begins, so the loss is called once more.
    monkeypatch.setenv("CRASHES_AT", "15")
    crashed = mkor("train", f"{tiny}:crashing", *arguments, "--output", "stopped")
    assert crashed.exit_code == 2
    assert re.fullmatch(
        r"Error: task 'tiny' failed in its loss: line \d+: RuntimeError: out of luck\.\n",
        crashed.stderr.splitlines(keepends=True)[-1],
    )
    assert load(tmp_path / "stopped")["step"] == 10
    resumed = mkor("train", f"{tiny}:task", *arguments, "--output", "stopped", "--resume")
    straight = mkor("train", f"{tiny}:task", *arguments, "--output", "straight")
    assert (resumed.exit_code, straight.exit_code) == (0, 0)
    assert_same_bits(load(tmp_path / "stopped"), load(tmp_path / "straight"))


def test_a_killed_process_is_continued_by_a_fresh_one(mkor, tiny, tmp_path, environment):
    def fresh(task, *more, **variables):
        command = ["train", f"{tiny}:{task}", "--checkpoint-every", "7", "--output", "fresh"]
        return subprocess.run(
            [sys.executable, "-m", "mkor_bench", *command, *more],
            check=False,
            capture_output=True,
            text=True,
            cwd=tmp_path,
            env={**environment, **variables},
        )

    assert fresh("killed", KILLED_AT="18").returncode == 9
    assert load(tmp_path / "fresh")["step"] == 14
    resumed = fresh("task", "--resume")
    assert resumed.returncode == 0
    assert resumed.stderr.startswith("tiny, mkor: 80 %, ")
    assert mkor("train", f"{tiny}:task", "--output", "straight").exit_code == 0
    assert_same_bits(load(tmp_path / "fresh"), load(tmp_path / "straight"))


def test_an_interrupted_run_is_saved_after_its_step(mkor, tiny, tmp_path, monkeypatch):
    monkeypatch.setenv("INTERRUPTED_AT", "7")  # the sixth step: one call is the trial
    stopped = mkor("train", f"{tiny}:interrupted", "--optimizer", "sgd", "--output", "run")
    assert stopped.exit_code == 130
    assert "Stopped after step 6 of 20. The same command with --resume" in stopped.stdout
    assert load(tmp_path / "run")["step"] == 6
    resumed = mkor("train", f"{tiny}:task", "--optimizer", "sgd", "--output", "run", "--resume")
    mkor("train", f"{tiny}:task", "--optimizer", "sgd", "--output", "straight")
    assert resumed.exit_code == 0
    assert_same_bits(load(tmp_path / "run"), load(tmp_path / "straight"))


def test_resume_takes_what_is_not_given_from_the_checkpoint(mkor, tiny, tmp_path):
    run = ("train", f"{tiny}:task", "--optimizer", "sgd", "--output", "run")
    mkor(*run, "--lr", 0.02, "--seed", 5, "--steps", 8)
    before = load(tmp_path / "run")
    assert mkor(*run, "--resume").exit_code == 0
    assert_same_bits(before, load(tmp_path / "run"))


def test_resume_refuses_another_run(mkor, tiny):
    mkor("train", f"{tiny}:task", "--optimizer", "sgd", "--output", "run", "--lr", 0.02)
    result = mkor(
        *("train", "digits-classifier", "--optimizer", "adamw", "--output", "run"),
        *("--lr", 0.5, "--seed", 0, "--resume"),
    )
    assert result.exit_code == 2
    assert result.stderr == (
        "Error: the checkpoint is of another run (task 'tiny' there, 'digits-classifier' here; "
        "optimizer 'sgd' there, 'adamw' here; lr 0.02 there, 0.5 here): "
        "give the same values, or another folder with --output.\n"
    )


def test_resume_refuses_another_model(mkor, tiny, tmp_path):
    run = ("train", f"{tiny}:task", "--optimizer", "sgd", "--output", "run")
    mkor(*run)
    state = load(tmp_path / "run")
    state["model"]["0.weight"] = torch.zeros(3, 4)
    del state["model"]["0.bias"]
    torch.save(state, tmp_path / "run" / FILE_NAME)
    result = mkor(*run, "--resume")
    assert result.exit_code == 2
    assert (
        "the checkpoint is of another model (0.bias absent there, [8] here; "
        "0.weight [3, 4] there, [8, 4] here)" in result.stderr
    )


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"garbage", "cannot be read (UnpicklingError): it is damaged or was not written by"),
        (None, "is not a checkpoint of mkor train: remove it, or choose another folder"),
    ],
)
def test_resume_refuses_another_file(mkor, tiny, tmp_path, content, message):
    path = tmp_path / "run" / FILE_NAME
    path.parent.mkdir()
    torch.save({"weights": torch.zeros(2)}, path)
    if content is not None:
        path.write_bytes(content)
    result = mkor("train", f"{tiny}:task", "--output", "run", "--resume")
    assert result.exit_code == 2
    assert message in result.stderr


@pytest.mark.parametrize("stopped_at", ["7", "0"])
def test_a_checkpoint_is_not_overwritten(mkor, tiny, tmp_path, monkeypatch, stopped_at):
    monkeypatch.setenv("INTERRUPTED_AT", stopped_at)
    run = ("train", f"{tiny}:interrupted", "--optimizer", "sgd", "--output", "run")
    mkor(*run)
    before = (tmp_path / "run" / FILE_NAME).read_bytes()
    result = mkor(*run)
    assert result.exit_code == 2
    assert result.stderr == (
        "Error: checkpoint 'run/checkpoint.pt' exists already: continue its run with --resume, "
        "choose another folder with --output, or remove the file.\n"
    )
    assert (tmp_path / "run" / FILE_NAME).read_bytes() == before


def test_a_single_training_has_the_tasks_learning_rate_for_its_optimizer(mkor, tmp_path):
    for optimizer, lr in (("mkor", 0.3), ("mkor:packed=True", 0.3), ("adamw", 0.03)):
        folder = tmp_path / optimizer.replace(":", "-")
        options = ("--optimizer", optimizer, "--steps", 2, "--output", folder)
        mkor("train", "digits-classifier", *options)
        assert load(folder)["settings"]["lr"] == lr


def test_a_rate_where_the_task_has_none_is_the_optimizers(mkor, tiny, tmp_path):
    for optimizer, lr in (("sgd", 0.01), ("auto", 0.003), ("auto:rank=3", 0.003)):
        folder = tmp_path / optimizer.replace(":", "-")
        mkor("train", f"{tiny}:task", "--optimizer", optimizer, "--output", folder, "--steps", 2)
        assert load(folder)["settings"]["lr"] == lr


def test_a_diverged_training_says_what_to_try(mkor, tiny):
    result = mkor("train", f"{tiny}:task", "--optimizer", "sgd", "--lr", "1e30")
    assert result.exit_code == 1
    assert "the run diverged; try a lower --lr than 1e+30." in result.stdout
