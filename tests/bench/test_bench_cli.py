"""The command line: its surface, its help, and what it says to mistakes."""

import re
import subprocess
import sys
import textwrap

import pytest
from typer.main import get_command

from mkor_bench.cli import app
from mkor_bench.help import COMPARE_HELP
from mkor_bench.optimizers import OPTIMIZERS
from mkor_bench.tasks import GROUPS, TASKS
from mkor_bench.workers import cores

# Changing this table changes what users type: say so in CHANGELOG.md.
SURFACE = {
    "": {"--version"},
    "compare": {
        "TASK",
        "--optimizers",
        "--lrs",
        "--steps",
        "--seeds",
        "--threads",
        "--output",
        "--data",
    },
    "train": {
        "TASK",
        "--optimizer",
        "--lr",
        "--steps",
        "--seed",
        "--threads",
        "--output",
        "--data",
        "--checkpoint-every",
        "--resume",
    },
    "study": {
        "NAME",
        "--quick",
        "--tasks",
        "--optimizers",
        "--seeds",
        "--lrs",
        "--autocast",
        "--workers",
        "--report",
        "--output",
        "--data",
    },
    "report": {"FOLDER"},
    "recipe": {
        *("FILE", "--check", "--optimizer", "--steps"),
        *("--checkpoint-every", "--resume", "--output", "--data"),
    },
    "estimate": {
        *("--model", "--methods", "--workers", "--bandwidth", "--latency", "--flops"),
        *("--batch", "--sequence", "--output"),
    },
}


def surface():
    group = get_command(app)
    return {
        name: {p.opts[0] if p.param_type_name == "option" else p.metavar for p in command.params}
        for name, command in {"": group, **group.commands}.items()
    }


def test_commands_and_options_are_frozen():
    assert surface() == SURFACE


def test_version(mkor):
    result = mkor("--version")
    assert result.exit_code == 0
    assert re.fullmatch(r"mkor (\d+\.\d+.*|not installed)\n", result.output)


def test_the_task_in_the_help_is_one(mkor, tmp_path):
    example = COMPARE_HELP[COMPARE_HELP.index("    import torch") :].partition("\nA function")[0]
    (tmp_path / "my_task.py").write_text(textwrap.dedent(example))
    result = mkor("train", "my_task.py:task", "--steps", 3)
    assert result.exit_code == 0, result.output


@pytest.mark.parametrize("command", ["compare", "train"])
def test_help_teaches(mkor, command):
    result = mkor(command, "--help")
    assert result.exit_code == 0
    for part in ("Examples:", "Written to the output folder:", "path/to/file.py:function"):
        assert part in result.output
    for name in [*TASKS, *OPTIMIZERS]:
        assert name in result.output


def test_help_of_the_report_teaches(mkor):
    result = mkor("report", "--help")
    for part in ("Examples:", "mkor report runs/mine", "Written to the folder: report.html"):
        assert part in result.output


def test_help_of_recipes_teaches(mkor):
    result = mkor("recipe", "--help")
    for part in ("Examples:", "mkor recipe recipes/", "--check", "Written to the output folder:"):
        assert part in result.output


def test_help_does_not_wait_for_torch():
    code = "import sys, mkor_bench.cli; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_groups_name_tasks():
    assert {task for tasks in GROUPS.values() for task in tasks} <= set(TASKS)


MISTAKES = {
    "study": (["study", "default"], "unknown study 'default': did you mean 'defaults'?"),
    "task of a study": (
        ["study", "defaults", "--tasks", "choices"],
        "unknown task 'choices': did you mean 'choice'?",
    ),
    "no task of a study": (
        ["study", "defaults", "--tasks", ","],
        "--tasks ',' names none: give names such as digits-autoencoder,shakespeare.",
    ),
    "no workers": (["study", "defaults", "--workers", "0"], "--workers must be from 1 to"),
    "study without its data": (["study", "defaults"], "MNIST is needed: name the folder that"),
    "task": (
        ["compare", "digist"],
        "unknown task 'digist': did you mean 'digits'?",
    ),
    "task without a near name": (
        ["compare", "xyz"],
        "unknown task 'xyz': choose from bert-",
    ),
    "optimizer": (
        ["compare", "digits", "--optimizers", "sgd,mkro"],
        "unknown optimizer 'mkro': did you mean 'mkor'",
    ),
    "no optimizer": (
        ["compare", "digits", "--optimizers", ","],
        "--optimizers ',' names none: give names such as sgd,mkor.",
    ),
    "zero learning rate": (
        ["compare", "digits", "--lrs", "0.1,0"],
        "learning rate 0 in --lrs must be a positive number",
    ),
    "word as learning rate": (
        ["compare", "digits", "--lrs", "fast"],
        "learning rate fast in --lrs must be a positive number",
    ),
    "infinite learning rate": (
        ["train", "digits-classifier", "--lr", "inf"],
        "learning rate inf in --lr must be a positive number",
    ),
    "no learning rate": (["compare", "digits", "--lrs", ""], "--lrs '' has no learning rate"),
    "no steps": (["compare", "digits", "--steps", "0"], "--steps must be at least 1, got 0"),
    "word as steps": (
        ["compare", "digits", "--steps", "x"],
        "--steps must be a whole number, got 'x': give one such as 100.",
    ),
    "fraction as seed": (
        ["train", "digits-classifier", "--seed", "1.5"],
        "--seed must be a whole number, got '1.5': give one such as 100.",
    ),
    "word as learning rate to train with": (
        ["train", "digits-classifier", "--lr", "fast"],
        "learning rate fast in --lr must be a positive number: give one such as 0.01.",
    ),
    "no seeds": (["compare", "digits", "--seeds", "0"], "--seeds must be from 1 to 1000, got 0"),
    "negative seed": (
        ["train", "digits-classifier", "--seed", "-1"],
        "--seed must be from 0 to 4294967295, got -1",
    ),
    "no threads": (
        ["compare", "digits", "--threads", "0"],
        f"--threads must be from 1 to {cores()}, got 0",
    ),
    "more threads than cores": (
        ["train", "digits-classifier", "--threads", "100000"],
        f"--threads must be from 1 to {cores()}, got 100000: give such a number",
    ),
    "negative interval": (
        ["train", "digits-classifier", "--checkpoint-every", "-5"],
        "--checkpoint-every must be at least 0, got -5",
    ),
    "data folder": (
        ["compare", "digits", "--data", "nowhere"],
        "data folder 'nowhere' does not exist: give an existing folder with --data",
    ),
    "group to train": (
        ["train", "digits"],
        "task 'digits' is a group of tasks: train one of them, "
        "digits-autoencoder or digits-classifier.",
    ),
    "optimizer to train with": (
        ["train", "digits-classifier", "--optimizer", "adam"],
        "unknown optimizer 'adam': did you mean 'adamw'",
    ),
    "output folder": (
        ["compare", "digits", "--output", "/dev/null/runs"],
        "output folder '/dev/null/runs' is not writable (Not a directory): "
        "choose another with --output.",
    ),
    "nothing to resume": (
        ["train", "digits-classifier", "--resume"],
        "no checkpoint to resume from: 'runs/train/digits-classifier-mkor/checkpoint.pt' "
        "does not exist; run without --resume, or give its folder with --output.",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_told_in_one_line_before_any_work(mkor, tmp_path, mistake):
    arguments, message = MISTAKES[mistake]
    result = mkor(*arguments)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr.startswith(f"Error: {message}")
    assert len(result.stderr.splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


def test_an_unwritable_folder_is_named(mkor, tmp_path):
    (tmp_path / "file").write_text("")
    result = mkor("train", "digits-classifier", "--output", tmp_path / "file")
    assert result.exit_code == 2
    assert re.search(r"output folder '.*file' is not writable", result.stderr)


IN_THE_WAY = {
    "results.json": "'out/results.json' is a folder where a file is to be written: remove it, or",
    "curves.png": "'out/curves.png' is a folder where a file is to be written: remove it, or",
    "tensorboard": "'out/tensorboard' is a file where a folder is to be written: remove it, or",
}


@pytest.mark.parametrize("command", ["compare", "train"])
@pytest.mark.parametrize("name", IN_THE_WAY)
def test_what_is_in_the_way_of_a_result_is_told_before_any_work(mkor, tmp_path, command, name):
    (tmp_path / "out").mkdir()
    if name == "tensorboard":
        (tmp_path / "out" / name).write_text("")
    else:
        (tmp_path / "out" / name).mkdir()
    result = mkor(command, "digits-classifier", "--output", "out")
    assert result.exit_code == 2
    assert result.stderr.startswith(f"Error: {IN_THE_WAY[name]}")
    assert [path.name for path in (tmp_path / "out").iterdir()] == [name]


@pytest.mark.parametrize("more", [[], ["--resume"]])
def test_a_folder_in_the_place_of_a_checkpoint_is_told(mkor, tmp_path, more):
    (tmp_path / "out/checkpoint.pt").mkdir(parents=True)
    result = mkor("train", "digits-classifier", "--output", "out", *more)
    assert result.exit_code == 2
    assert "'out/checkpoint.pt' is a folder where a file is to be written" in result.stderr
