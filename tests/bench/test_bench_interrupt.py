"""Signals and failures while worker processes are at work."""

import signal
import subprocess
import sys
import time

import pytest

from mkor_bench.compare import Plan, compare
from mkor_bench.errors import UserError
from mkor_bench.tasks.source import TaskSource
from mkor_bench.workers import Workers, cores


def alive(pid):
    told = subprocess.run(["ps", "-o", "stat=", "-p", pid], check=False, capture_output=True)
    return told.stdout.strip()[:1] not in (b"", b"Z")


def wait_until(holds, seconds=60):
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.05)


def started(environment, tmp_path, *arguments):
    return subprocess.Popen(
        [sys.executable, "-m", "mkor_bench", *arguments],
        cwd=tmp_path,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.skipif(cores() < 2, reason="a single worker is the command itself")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_workers_end_with_their_parent(environment, tiny, tmp_path, number):
    (tmp_path / "pids").mkdir()
    command = started(
        {**environment, "PIDS": str(tmp_path / "pids")}, tmp_path, "compare", f"{tiny}:stuck"
    )
    wait_until(lambda: list((tmp_path / "pids").iterdir()))
    pids = [path.name for path in (tmp_path / "pids").iterdir()]
    command.send_signal(number)
    out, err = command.communicate(timeout=30)
    wait_until(lambda: not any(map(alive, pids)))
    if number == signal.SIGTERM:
        assert command.returncode == 130
        assert err.splitlines()[-1] == "Interrupted."
        assert "Traceback" not in out + err


@pytest.mark.parametrize("command", ["compare", "train"])
def test_ctrl_c_while_torch_is_imported_is_told_in_a_word(environment, tmp_path, command):
    process = started(environment, tmp_path, command, "digits-classifier")
    time.sleep(0.8)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=30)
    assert (process.returncode, out, err) == (130, "", "Interrupted.\n")


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("crashing", r"task 'tiny' failed in its loss: line \d+: RuntimeError: out of luck\."),
        ("killed", "a worker process ended before its work did, as when memory runs out: free"),
    ],
)
def test_what_ends_a_worker_is_told(tiny, monkeypatch, function, message):
    monkeypatch.setenv(f"{function.upper().replace('ING', 'ES')}_AT", "15")
    plan = Plan((TaskSource(f"{tiny}:{function}"),), ("sgd",), seeds=1, lrs=(0.01, 0.1))
    with pytest.raises(UserError, match=message), Workers(2, threads=1) as workers:
        compare(plan, workers, lambda *told: None)
