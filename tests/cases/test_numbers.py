"""Every case has a test that carries its number."""

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


def numbered() -> dict[int, list[str]]:
    """Names of tests by the case numbers in them."""
    found: dict[int, list[str]] = {}
    for path in TESTS.rglob("test_*.py"):
        for name in re.findall(r"^def (test_a\d\d_\w+)", path.read_text(), re.MULTILINE):
            for number in re.findall(r"(?<=[_])a(\d\d)(?=_)", name):
                found.setdefault(int(number), []).append(name)
    return found


def test_every_case_has_a_test():
    assert CASES - numbered().keys() == set()


def test_no_test_carries_a_number_that_is_no_case():
    assert numbered().keys() - CASES == set()


def test_numbers_are_read_from_names():
    names = numbered()
    assert "test_a13_a14_checkpointing" in names[13] and "test_a13_a14_checkpointing" in names[14]
