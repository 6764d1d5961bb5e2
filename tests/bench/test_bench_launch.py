"""How a process that ``torchrun`` started ends."""

import subprocess
import sys

import pytest

RUN = """
import atexit, sys
atexit.register(print, "cleaned up")
from mkor_bench.cli import main
sys.argv = ["mkor", *sys.argv[1:]]
main()
"""
LAUNCHED = {"RANK": "0", "WORLD_SIZE": "1"}


@pytest.mark.parametrize("launched", [False, True])
@pytest.mark.parametrize(("argument", "code"), [("--version", 0), ("--no-such-option", 2)])
def test_a_launched_process_ends_without_clean_up(environment, launched, argument, code):
    ended = subprocess.run(
        [sys.executable, "-c", RUN, argument],
        env={**environment, **(LAUNCHED if launched else {})},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert ended.returncode == code
    said = ended.stderr if code else ended.stdout
    assert ("No such option" if code else "mkor ") in said  # nothing is lost
    assert ("cleaned up" not in ended.stdout) is launched


@pytest.mark.parametrize("launched", [False, True])
def test_a_launched_process_ends_after_a_fault_too(environment, launched):
    """The others wait in a collective until torchrun sees that it has ended."""
    broken = "import mkor_bench.cli\ndef app():\n    raise ValueError('no luck')\n"
    run = RUN.replace("main()\n", "mkor_bench.cli.app = app\nmain()\n")
    ended = subprocess.run(
        [sys.executable, "-c", broken + run, "--version"],
        env={**environment, **(LAUNCHED if launched else {})},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert ended.returncode == 1
    assert "ValueError: no luck" in ended.stderr
    assert ("cleaned up" not in ended.stdout) is launched
