"""`mkor train`, killed twenty times at random moments, ends where it would have ended."""

import os
import random
import shutil
import signal
import subprocess
import sys
import time

import pytest

from bench.test_bench_train import assert_same_bits, load
from mkor_bench.checkpoint import FILE_NAME
from mkor_bench.files import remove_leftovers, write_atomically

KILLS = 20
EVERY = 3
# Starts each attempt from a process that has imported everything, which takes seconds.
HOST = """
import os, sys
import matplotlib.pyplot, torch.utils.tensorboard
from mkor_bench.cli import main
import mkor_bench.commands
for line in sys.stdin:
    child = os.fork()
    if child == 0:
        sys.argv = ["mkor", *line.split()]
        main()
    print(child, flush=True)
    _, status = os.waitpid(child, 0)
    print(status, flush=True)
"""


class Host:
    """Runs `mkor` with arguments in a process of its own, one after the other."""

    def __init__(self, folder, environment):
        self.process = subprocess.Popen(
            [sys.executable, "-c", HOST],
            cwd=folder,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )

    def start(self, *arguments):
        """The id of the process."""
        self.process.stdin.write(" ".join(arguments) + "\n")
        self.process.stdin.flush()
        return self.read()

    def read(self):
        """The next number that the host tells: other lines are the command's."""
        while not (line := self.process.stdout.readline()).strip().lstrip("-").isdigit():
            assert line, "the host has ended"
        return int(line)


@pytest.fixture
def host(tmp_path, environment):
    running = Host(tmp_path, {**environment, "CALLS": str(tmp_path / "calls")})
    yield running
    running.process.communicate(timeout=60)


def calls(folder):
    return (folder / "calls").stat().st_size if (folder / "calls").exists() else 0


def kill_at_a_random_moment(process, folder, before, source):
    """After a random number of steps, or while it starts, and a bit; the number of calls since."""
    wanted = source.choice([0, 0, *range(2, 8)])
    end = time.monotonic() + 60
    while calls(folder) - before < wanted:
        assert time.monotonic() < end
        time.sleep(0.0005)
    time.sleep(source.uniform(0, 0.01 if wanted else 0.2))
    os.kill(process, signal.SIGKILL)


def steps_of(folder):
    return load(folder)["step"] if (folder / FILE_NAME).exists() else 0


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_run_that_is_killed_twenty_times_ends_where_it_would_have(host, tiny, tmp_path):
    run = ("train", f"{tiny}:counted", "--optimizer", "mkor-adamw", "--output")
    often = ("--checkpoint-every", str(EVERY))
    source = random.Random(0)
    folder = tmp_path / "killed"
    for _ in range(KILLS):
        before, saved = calls(tmp_path), steps_of(folder)
        more = ("--resume",) if saved else ()
        process = host.start(*run, "killed", *often, *more)
        kill_at_a_random_moment(process, tmp_path, before, source)
        assert host.read() == signal.SIGKILL  # it did not end by itself
        # One call tries the task; the step of the last may not have ended.
        ended = saved + max(0, calls(tmp_path) - before - 2)
        now = steps_of(folder)
        assert now >= max(saved, ended // EVERY * EVERY)
        assert now % EVERY == 0
        if not now:
            shutil.rmtree(folder, ignore_errors=True)
    assert 0 < now < 150
    host.start(*run, "killed", "--checkpoint-every", "0", "--resume")
    assert host.read() == 0
    host.start(*run, "straight", "--checkpoint-every", "0")
    assert host.read() == 0
    assert_same_bits(load(folder), load(tmp_path / "straight"))
    assert [p.name for p in folder.iterdir() if p.name.startswith(".")] == []


def test_leftovers_of_killed_processes_are_removed(tmp_path):
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    theirs, mine, other = (
        tmp_path / f".checkpoint.{number}.pt" for number in (ended.pid, os.getppid(), "x1")
    )
    for path in (theirs, mine, other):
        path.write_text("half")
    write_atomically(tmp_path / FILE_NAME, lambda path: path.write_text("whole"))
    assert (tmp_path / FILE_NAME).read_text() == "whole"
    assert not theirs.exists()
    assert mine.exists() and other.exists()
    remove_leftovers(tmp_path / "absent" / FILE_NAME)
