"""Every case has a test that carries its number, for every method, or a reason why it hasn't."""

import re
from pathlib import Path

TESTS = Path(__file__).parents[1]

CASES = {
    *(1, 3, 4, 5, 6, 7, 8, 9, 10, 12, 13, 14, 15, 16, 17, 18, 20, 21, 22, 24, 25, 26, 27, 28, 29),
    *(31, 32, 33, 34, 35, 36, 38, 39, 40, 41, 42, 44, 45, 46, 47, 48, 49, 51, 53, 54, 55, 56, 57),
    *(58, 59, 60, 62, 63, 64, 66, 68, 69, 70, 71, 72, 73, 76, 77, 78, 79, 81, 82, 83, 84, 85, 86),
    *(87, 88, 89, 90, 91),
}
"""The numbers of the conformance cases: A01 to A91, some of which were never given."""

SEVERAL = {71, 84, 85, 86, 87, 89}
"""Those that take several workers: processes are dear, and what crosses is the contract's."""

SOME = {
    5: "momentum in units of its own moves a layer that shows nothing (`gradient_sized`)",
    7: "blocks and signs belong to a call: two calls are other blocks and signs than one",
    25: "several devices are refused before there is a method",
    32: "momentum in units of its own moves a layer without a gradient (`gradient_sized`)",
    46: "blocks and signs belong to the shape of a call",
    47: "signs belong to the shape of a call",
    48: "momentum in units of its own doesn't keep a gradient's norm (`gradient_sized`)",
    56: "the scale of a loss is a learning rate, a damping or nothing, by the method",
    69: "K-BFGS sees gradients by a closure, and momentum keeps the norm of the momentum",
    90: "a compiled step takes seconds each: one method of each kind of statistic and state",
}
"""Cases that no single test runs on every method, and why not."""

DEF = re.compile(r"((?:^@.*\n(?:^[ )\]].*\n)*)*)^def (test_a\d\d_\w+)", re.MULTILINE)
"""A test with the lines of its decorators."""


def numbered(marked: str = "") -> dict[int, list[str]]:
    """Names of tests by the case numbers in them; of those whose decorators match a pattern."""
    found: dict[int, list[str]] = {}
    for path in TESTS.rglob("test_*.py"):
        for decorators, name in DEF.findall(path.read_text()):
            if re.search(marked, decorators):
                for number in re.findall(r"(?<=[_])a(\d\d)(?=_)", name):
                    found.setdefault(int(number), []).append(name)
    return found


def test_every_case_has_a_test():
    assert CASES - numbered().keys() == set()


def test_no_test_carries_a_number_that_is_no_case():
    assert numbered().keys() - CASES == set()


def test_every_case_runs_on_every_method_or_says_why_not():
    every = numbered(r"@every_(method|optimizer)\b").keys()
    assert CASES - every - SOME.keys() - SEVERAL == set()
    assert SOME.keys() & every == set()


def test_numbers_are_read_from_names():
    names = numbered()
    assert "test_a25_data_parallel_is_refused" in names[25]
    assert "test_a13_a14_checkpointing" in names[13] and "test_a13_a14_checkpointing" in names[14]
