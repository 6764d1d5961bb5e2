"""The command run in this process, in a folder of its own, with one worker."""

import os
from pathlib import Path

import pytest
from typer.testing import CliRunner

import mkor_bench

TINY = Path(__file__).with_name("tiny_task.py")


@pytest.fixture
def tiny():
    """The user's task file."""
    return str(TINY)


@pytest.fixture
def environment():
    """The environment of a fresh process that runs ``python -m mkor_bench`` anywhere."""
    root = str(Path(mkor_bench.__file__).parents[1])
    return {**os.environ, "PYTHONPATH": root, "OMP_NUM_THREADS": "1"}


def command_in(folder, patch):
    """Returns a function that runs ``mkor`` with arguments, as typed in that folder."""
    from mkor_bench import commands
    from mkor_bench.cli import app
    from mkor_bench.tasks import source

    patch.chdir(folder)
    patch.delenv("MKOR_DATA", raising=False)
    patch.setattr(commands, "default_workers", lambda threads: 1)
    source.load_once.cache_clear()  # as in a fresh process

    def run(*arguments):
        result = CliRunner().invoke(app, [str(argument) for argument in arguments])
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        return result

    return run


@pytest.fixture(scope="session")
def mkor_in():
    """:func:`command_in`, for tests that run ``mkor`` in a folder of their own."""
    return command_in


@pytest.fixture
def mkor(tmp_path, monkeypatch):
    """Runs ``mkor`` with arguments, as typed in ``tmp_path``."""
    return command_in(tmp_path, monkeypatch)


@pytest.fixture(scope="module")
def compared(tmp_path_factory):
    """What a small ``mkor compare digits`` printed, and the folder that it wrote to."""
    folder = tmp_path_factory.mktemp("compared")
    options = ["--steps", "12", "--seeds", "2", "--lrs", "0.01,0.1", "--optimizers", "sgd,mkor"]
    with pytest.MonkeyPatch.context() as patch:
        result = command_in(folder, patch)("compare", "digits", *options)
    assert result.exit_code == 0, result.output
    return result, folder / "runs/digits"
