"""The lock pins everything, and the demonstration installs a part of what the tests install."""

import re
from pathlib import Path

REQUIREMENTS = Path(__file__).parents[1] / "requirements"


def pins(name: str) -> list[str]:
    lines = (REQUIREMENTS / name).read_text(encoding="utf-8").splitlines()
    return [line for line in lines if not line.startswith("#")]


def test_every_requirement_is_pinned():
    lines = pins("demo.txt") + pins("test.txt")
    pinned = re.compile(r"[a-z0-9-]+(\[[a-z0-9,-]+\])?==[\w.+!]+( ; .+)?")
    assert [line for line in lines if not pinned.fullmatch(line)] == []


def test_the_demonstration_is_a_part_of_the_tests():
    versions = {line.split(" ;")[0] for line in pins("test.txt")}
    assert {line.split(" ;")[0] for line in pins("demo.txt")} <= versions


def test_torch_is_pinned_once_and_without_cuda_packages():
    lines = pins("test.txt")
    assert [line for line in lines if line.startswith("torch==")] == ["torch==2.13.0"]
    assert [line for line in lines if re.match(r"nvidia|cuda|triton", line)] == []
