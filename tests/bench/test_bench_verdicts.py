"""What each study makes of made-up figures, for and against the paper."""

import math

import pytest

from mkor_bench.report.section import Verdict
from mkor_bench.studies import (
    ablation,
    breakdown,
    complexity,
    convergence,
    frequency,
    hybrid,
    learning_rate,
    memory,
    rank,
    scaling,
    spectrum,
)
from mkor_bench.studies.finding import Check, judge
from mkor_bench.studies.outcome import TaskOutcome
from mkor_bench.studies.runs import handed_over
from mkor_bench.studies.stages import mean_step
from mkor_bench.summary import OptimizerResult, TaskResult
from mkor_bench.tasks.source import TaskSource
from mkor_bench.train import Run, Settings

YES, NO, OPEN = Check("a", True), Check("b", False), Check("c", None)


@pytest.mark.parametrize(
    ("checks", "verdict", "reason"),
    [
        ([YES, YES], Verdict.HOLDS, "Met: a; a."),
        ([NO], Verdict.FAILS, "Not met: b."),
        ([YES, NO, OPEN], Verdict.PARTLY, "Met: a. Not met: b. Not decided: c."),
        ([YES, OPEN], Verdict.OPEN, "Met: a. Not decided: c."),
        ([NO, OPEN], Verdict.OPEN, "Not met: b. Not decided: c."),
        ([], Verdict.OPEN, "Nothing that the claim is about was measured."),
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


def stages(update, extra=0.0, rest=1.0):
    """Seconds of steps where second-order information costs `update` and, in hooks, `extra`."""
    plain = {"passes": rest, "update": 0.0, "precondition": 0.1, "weights": 0.1}
    updating = {**plain, "passes": rest + extra, "update": update}
    kinds = {"plain": plain, "updating": updating}
    return {"sgd": 1.0, **{k: {**v, "total": sum(v.values())} for k, v in kinds.items()}}


def test_breakdown():
    good = {"bert": {"kfac": stages(9.0), "hylo-kid": stages(5.0, 1.0), "mkor": stages(1.0)}}
    assert verdict_of(breakdown.checks(good)) is Verdict.HOLDS
    dear = {"bert": {"kfac": stages(9.0), "mkor": stages(20.0)}}
    assert verdict_of(breakdown.checks(dear)) is Verdict.FAILS
    assert verdict_of(breakdown.checks({"bert": {**good["bert"], "mkor": stages(7.0)}})) is (
        Verdict.PARTLY
    )
    assert verdict_of(breakdown.checks({"bert": {"sgd": stages(0.0)}})) is Verdict.OPEN


def test_the_mean_step_pays_for_an_update_once_an_interval():
    step = mean_step(stages(5.0, 1.0), 10)
    assert (step["update"], step["factors"], step["passes"]) == pytest.approx((0.5, 0.1, 1.0))
    assert step["total"] == pytest.approx(1.2 + 0.6)


def test_frequency():
    times = {"bert": {"mkor": stages(1.0), "kaisa-eigen": stages(20.0)}}
    losses = {"task": {"mkor": {1: (1.0, 0.1), 100: (2.0, 0.1)}}}
    assert verdict_of(frequency.checks(times, losses)) is Verdict.HOLDS
    swapped = {"bert": {"mkor": stages(20.0), "kaisa-eigen": stages(1.0)}}
    near = {"task": {"mkor": {1: (1.0, 0.1), 100: (1.05, 0.1)}}}
    assert verdict_of(frequency.checks(swapped, near)) is Verdict.FAILS
    assert verdict_of(frequency.checks(times, near)) is Verdict.PARTLY
    diverged = {"task": {"mkor": {1: (1.0, 0.1), 100: (math.inf, math.nan)}}}
    assert verdict_of(frequency.checks({}, diverged)) is Verdict.OPEN


def course(mean, best):
    """Errors of one layer on both sides, at the start and at the end."""
    by_name = {"mean": mean, "best rank 1": best}
    looks = {name: [{"layer": x} for x in values] for name, values in by_name.items()}
    return dict.fromkeys(rank.SIDES, looks)


def test_rank():
    assert verdict_of(rank.checks({"task": course((0.5, 0.2), (0.4, 0.15))})) is Verdict.HOLDS
    assert verdict_of(rank.checks({"task": course((0.5, 1.0), (0.4, 0.5))})) is Verdict.FAILS
    assert verdict_of(rank.checks({"task": course((0.5, 0.9), (0.4, 0.15))})) is Verdict.PARTLY
    assert verdict_of(rank.checks({})) is Verdict.OPEN


def narrow(condition, damped, ours, theirs, least):
    """A training's end with one layer."""
    own = {"condition": condition, "damped": damped}
    found = {
        "mkor bfloat16": {"error": ours, "least": least},
        "kfac bfloat16": {"error": theirs, "least": 1.0},
    }
    return {"spectra": [{"layer": own}], "narrowed": {"layer": found}}


def test_spectrum():
    good = {"task": narrow(1e9, 1e3, 0.01, 0.5, 0.1)}
    assert verdict_of(spectrum.checks(good)) is Verdict.HOLDS
    assert verdict_of(spectrum.checks({"task": narrow(1e2, 10, 0.5, 0.01, -1)})) is Verdict.FAILS
    # What is not finite is kept as null.
    assert verdict_of(spectrum.checks({"task": narrow(1e9, 1e3, None, 0.5, -1)})) is Verdict.PARTLY
    assert verdict_of(spectrum.checks({})) is Verdict.OPEN


STEPS = 40


def tuned(name, by, *, to=1.0, ratio=1.0, metric=0.9, seconds=1.0):
    """An optimizer whose loss falls from 100 to a value within some steps."""
    losses = [max(to, 100 - (100 - to) * (step + 1) / by) for step in range(STEPS)]
    spent = [seconds * (step + 1) for step in range(STEPS)]
    made = OptimizerResult(
        name, {}, {0.1: [Run(Settings(name, 0.1, 0, STEPS), losses, spent, metric)]}
    )
    made.step_seconds, made.step_time_ratio = 0.01 * ratio, ratio
    return made


def outcome(*results):
    task = TaskSource("digits-classifier").load()
    return TaskOutcome(TaskResult(task, STEPS, list(results)), {})


def test_convergence():
    base, rivals = tuned("sgd", 40), [tuned("kfac", 30, ratio=2), tuned("eva", 30)]
    good = outcome(base, *rivals, tuned("mkor", 10), tuned("mkor-h", 9))
    assert verdict_of(convergence.checks([good])) is Verdict.HOLDS
    dear = outcome(base, *rivals, tuned("mkor", 20, ratio=3))
    assert verdict_of(convergence.checks([dear])) is Verdict.PARTLY
    never = tuned("mkor", 40, to=5.0, metric=0.5)
    assert verdict_of(convergence.checks([outcome(base, *rivals, never)])) is Verdict.FAILS
    assert verdict_of(convergence.checks([outcome(base)])) is Verdict.OPEN


def test_hybrid():
    def rows(ours, *handed):
        results = {"sgd": tuned("sgd", 40), "mkor": tuned("mkor", 20, seconds=2)}
        rows = {name: hybrid.Row(result) for name, result in results.items()}
        return {"task": {**rows, "mkor-h": hybrid.Row(ours, handed)}}

    good = rows(tuned("mkor-h", 20, seconds=1.5), 25)
    assert verdict_of(hybrid.checks(good)) is Verdict.HOLDS
    worse = rows(tuned("mkor-h", 39, to=9, seconds=3), 25)
    assert verdict_of(hybrid.checks(worse)) is Verdict.FAILS
    assert verdict_of(hybrid.checks(rows(tuned("mkor-h", 20), None))) is Verdict.OPEN


def test_the_hand_over_is_where_no_layer_is_preconditioned_any_more():
    run = Run(Settings("mkor-h", 0.1, 0, STEPS))
    run.watched = {n: {"layers preconditioned": 3.0 if n < 20 else 0.0} for n in range(1, 41, 3)}
    assert handed_over(run) == 22
    run.watched = {n: {"layers preconditioned": 3.0} for n in range(1, 41, 3)}
    assert handed_over(run) is None
    run.watched = {n: {"learning rate": 0.1} for n in range(1, 41, 3)}
    assert handed_over(run) is None


def test_learning_rate():
    def found(**marks):
        return {"task": {name: dict(enumerate(ends)) for name, ends in marks.items()}}

    steps = [(94, ""), (79, ""), (78, ""), (76, "")]
    good = found(mkor=steps, sgd=[(None, "D"), (None, "D"), (108, ""), (145, "*")])
    assert verdict_of(learning_rate.checks(good)) is Verdict.HOLDS
    bad = found(mkor=[(None, "D"), (9, "*"), (50, ""), (9, "*")], sgd=steps)
    assert verdict_of(learning_rate.checks(bad)) is Verdict.FAILS
    assert verdict_of(learning_rate.checks(found(sgd=steps))) is Verdict.OPEN


def test_a_run_converges_at_a_share_of_the_way_to_the_lowest_loss():
    runs = {
        ("sgd", 1.0): tuned("sgd", 20).runs[0],
        ("sgd", 0.1): tuned("sgd", 10, to=50.0).runs[0],
        ("sgd", 10.0): Run(Settings("sgd", 10.0, 0, STEPS), [100.0, math.inf], [1.0, 2.0]),
        ("mkor", 10.0): Run(Settings("mkor", 10.0, 0, STEPS), [100.0] * STEPS, [1.0] * STEPS),
    }
    found = learning_rate.ends(runs)
    # The loss falls in 20 steps, in 10 steps; the means of two losses are half a step behind.
    assert found["sgd"][1.0][1] == "" and 19 <= found["sgd"][1.0][0] <= 21
    assert found["sgd"][0.1][1] == "*" and 9 <= found["sgd"][0.1][0] <= 11
    assert found["sgd"][10.0] == found["mkor"][10.0] == (None, "D")


def lemmas(least=1e-9, share=0.1, left=70, held=None):
    grown = [
        {"least": least, "stabilised": False, "left": left},
        {"least": least, "stabilised": True, "left": held},
    ]
    return {"grown": grown, "quantized": [{"error": share, "bound": 1.0}]}


def test_the_lemmas():
    assert verdict_of(ablation.lemma_checks(lemmas())) is Verdict.HOLDS
    against = lemmas(least=-1e-3, share=2.0, left=None, held=80)
    assert verdict_of(ablation.lemma_checks(against)) is Verdict.FAILS
    assert verdict_of(ablation.lemma_checks(lemmas(held=80))) is Verdict.PARTLY


def test_what_is_taken_away_from_mkor():
    stabiliser, scale, printed, _, half = list(ablation.VARIANTS)[2:]
    good = {"mkor": (1.0, 0.1), stabiliser: (math.inf, math.nan), scale: (2.0, 0.1)}
    good |= {printed: (1.05, 0.1), half: (0.9, 0.1)}
    assert verdict_of(ablation.training_checks({"task": good})) is Verdict.HOLDS
    bad = {"mkor": (1.0, 0.1), stabiliser: (0.5, 0.1), scale: (1.05, 0.1)}
    bad |= {printed: (2.0, 0.1), half: (math.inf, math.nan)}
    assert verdict_of(ablation.training_checks({"task": bad})) is Verdict.FAILS
    lost = {**good, "mkor": (math.inf, math.nan)}
    assert verdict_of(ablation.training_checks({"task": lost})) is Verdict.OPEN


def test_scaling():
    rows = {"MKOR": {"seconds": 1.2, "predicted": 1.0}}
    good = {"LAMB": {"1": 64.0, "64": 1.1}, "MKOR": {"1": 65.0, "64": 1.15}}
    good["K-FAC"] = {"1": 70.0, "64": 2.0}
    checks = scaling.checks({1: rows, 2: rows}, good, 2)
    assert [check.met for check in checks] == [True, True, None, None]
    assert verdict_of(checks) is Verdict.OPEN  # a prediction confirms nothing
    slow = {"MKOR": {"seconds": 9.0, "predicted": 1.0}}
    bad = {**good, "MKOR": {"1": 65.0, "64": 3.0}}
    assert verdict_of(scaling.checks({1: slow}, bad, 2)) is Verdict.FAILS
    # Processes that share cores say nothing of the prediction.
    assert scaling.checks({4: slow}, {}, 2) == []


def test_the_efficiency_is_what_is_left_of_the_ideal_speed_up():
    assert scaling.efficiency({"1": 64.0, "4": 20.0, "64": 2.0}) == pytest.approx(0.5)
