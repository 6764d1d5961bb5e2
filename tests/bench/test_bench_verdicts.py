"""What each study makes of made-up figures, for and against the paper."""

import pytest

from mkor_bench.report.section import Verdict
from mkor_bench.studies import complexity, memory
from mkor_bench.studies.finding import Check, judge

YES, NO, OPEN = Check("a", True), Check("b", False), Check("c", None)


@pytest.mark.parametrize(
    ("checks", "verdict", "reason"),
    [
        ([YES, YES], Verdict.HOLDS, "Met: a; a."),
        ([NO], Verdict.FAILS, "Not met: b."),
        ([YES, NO, OPEN], Verdict.PARTLY, "Met: a. Not met: b. Not decided: c."),
        ([YES, OPEN], Verdict.OPEN, "Met: a. Not decided: c."),
        ([NO, OPEN], Verdict.OPEN, "Not met: b. Not decided: c."),
        ([], Verdict.OPEN, "Nothing was measured."),
    ],
)
def test_a_verdict_follows_from_its_checks(checks, verdict, reason):
    assert judge(checks) == (verdict, reason)


def test_the_quick_size_decides_nothing():
    verdict, reason = judge([YES], quick=True)
    assert verdict is Verdict.OPEN and reason.endswith("too small to decide anything. Met: a.")


def verdict_of(checks):
    return judge(checks)[0]


EXPONENTS = {"time_d": 2.0, "time_b": 0.1, "bytes_d": 2.0, "sent_d": 1.0, "sent_b": 0.0}


def table_1(**changes):
    names = ("mkor", "eva", "kfac", "sngd")
    found = {name: {**EXPONENTS, **changes.get(name, {})} for name in names}
    found["kfac"] = {**found["kfac"], "time_d": 3.0, "sent_d": 2.0, **changes.get("kfac", {})}
    found["sngd"] = {**found["sngd"], "time_b": 2.8, **changes.get("sngd", {})}
    return found


def test_complexity():
    assert verdict_of(complexity.checks(table_1(), 2048)) is Verdict.HOLDS
    worse = table_1(mkor={"time_d": 3.0})
    assert verdict_of(complexity.checks(worse, 2048)) is Verdict.PARTLY
    # Small sizes do not tell exponents of time, and traffic alone decides nothing.
    assert verdict_of(complexity.checks(table_1(), 256)) is Verdict.OPEN
    assert verdict_of(complexity.checks({}, 2048)) is Verdict.OPEN


def test_an_exponent_is_the_slope_between_the_largest_two():
    points = [{"d": 4, "s": 1.0}, {"d": 8, "s": 2.0}, {"d": 32, "s": 128.0}]
    assert complexity.exponent(points, "d", "s") == pytest.approx(3)
    assert complexity.exponent([{"d": 2, "s": 0}, {"d": 4, "s": 0}], "d", "s") != 0


def test_memory():
    good = {"bert": {"sgd": 10, "adamw": 12, "mkor": 20, "kfac": 30}}
    assert verdict_of(memory.checks(good)) is Verdict.HOLDS
    assert verdict_of(memory.checks({"bert": {**good["bert"], "kfac": 19}})) is Verdict.PARTLY
    light = {"bert": {"sgd": 30, "mkor": 20, "kfac": 20}}
    assert verdict_of(memory.checks(light)) is Verdict.FAILS
    assert verdict_of(memory.checks({"bert": {"sgd": 10}})) is Verdict.OPEN
