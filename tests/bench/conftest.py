"""The command run in this process, in a folder of its own, with one worker."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

TINY = Path(__file__).with_name("tiny_task.py")


@pytest.fixture
def tiny():
    """The user's task file."""
    return str(TINY)


@pytest.fixture
def mkor(tmp_path, monkeypatch):
    """Runs ``mkor`` with arguments, as typed."""
    from mkor_bench import commands
    from mkor_bench.cli import app
    from mkor_bench.tasks import source

    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MKOR_DATA", raising=False)
    monkeypatch.setattr(commands, "default_workers", lambda threads: 1)

    source.load_once.cache_clear()  # as in a fresh process

    def run(*arguments):
        result = CliRunner().invoke(app, [str(argument) for argument in arguments])
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        return result

    return run
