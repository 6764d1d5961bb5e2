"""The rule of the hybrid switch on loss curves, without a network."""

import itertools
import math
import random

import pytest

import mkor
from mkor.hybrid import Course


def switches(losses, **options):
    """The windows after which the phase changes, and the last course; one loss a window."""
    rule = mkor.HybridSwitch(window=1, **options)
    course, out = Course(), []
    for window, loss in enumerate(losses):
        before = course
        course = rule.follow(course, window + 1, loss)
        if course.preconditioning != before.preconditioning:
            out.append(window)
    return out, course


def knee(windows, time=5.0, least=1.0):
    """Falls exponentially to a floor."""
    return [least + math.exp(-t / time) for t in range(windows)]


def by_hand(losses, threshold, patience, smoothing):
    falls = [(a - b) / abs(a) for a, b in itertools.pairwise(losses)]
    smooth = []
    for k in range(1, len(falls) + 1):
        weights = [smoothing ** (k - 1 - j) for j in range(k)]
        sums = sum(w * f for w, f in zip(weights, falls, strict=False))
        smooth.append(sums / sum(weights))
    low = 0
    for k, value in enumerate(smooth):
        low = low + 1 if value <= threshold * max(0.0, *smooth[: k + 1], 0.0) else 0
        if low == patience:
            return k + 1
    return None


@pytest.mark.parametrize("threshold", [0.03, 0.1, 0.3])
@pytest.mark.parametrize("smoothing", [0.0, 0.5, 0.9])
@pytest.mark.parametrize("patience", [1, 3])
def test_the_switch_is_where_the_formula_has_it(threshold, smoothing, patience):
    losses = knee(80)
    options = {"threshold": threshold, "smoothing": smoothing, "patience": patience}
    expected = by_hand(losses, **options)
    assert expected > patience
    assert switches(losses, **options)[0] == [expected]


def test_a_loss_that_keeps_falling_at_its_rate_never_hands_over():
    assert switches([math.exp(-t / 10) for t in range(300)])[0] == []
    assert switches([2.0 ** (-t) for t in range(50)])[0] == []


@pytest.mark.parametrize("patience", [1, 2, 5])
def test_a_flat_loss_hands_over_after_the_patience(patience):
    assert switches([3.0] * 20, patience=patience)[0] == [patience]


def test_a_loss_that_rises_hands_over():
    assert switches([1.1**t for t in range(20)])[0] == [2]


def test_noise_is_smoothed():
    source = random.Random(0)
    losses = [value + source.gauss(0, 0.005) for value in knee(60)]
    ((window,), _) = switches(losses)
    assert 8 <= window <= 25


def test_one_bad_window_is_not_enough():
    losses = [math.exp(-t / 5) for t in range(30)]
    losses[10] = losses[9] * 1.2
    assert switches(losses, smoothing=0.0)[0] == []
    assert switches(losses, smoothing=0.0, patience=1)[0] == [10]


def test_no_switch_before_the_warm_up():
    assert switches([3.0] * 40, warmup=20)[0] == [19]


def test_a_slow_start_is_not_the_reference():
    warming = [5 - 0.001 * t for t in range(5)]
    losses = [*warming, *(5 * value / 2 for value in knee(60))]
    ((window,), _) = switches(losses, warmup=8)
    ((expected,), _) = switches([5 * value / 2 for value in knee(60)])
    assert abs(window - 5 - expected) <= 2


@pytest.mark.parametrize("shift", [0.0, -1.0])
def test_losses_may_be_zero_or_negative(shift):
    losses = [math.exp(-t) + shift for t in range(3)] + [shift] * 20
    (out, course) = switches(losses)
    assert len(out) == 1 and math.isfinite(course.sum)


def test_scale_of_the_loss_changes_nothing():
    assert switches(knee(60))[0] == switches([1e-6 * v for v in knee(60)])[0]


def test_the_base_gives_back_when_the_loss_rises_above_that_at_the_hand_over():
    losses = [3.0] * 5 + [2.9] * 5 + [3.2] * 10
    assert switches(losses, back=0.05, patience=3)[0] == [3, 12, 15]
    assert switches(losses, back=0.1, patience=3)[0] == [3]
    assert switches(losses, patience=3)[0] == [3]


def test_a_phase_lasts_as_long_as_the_warm_up():
    losses = [3.0] * 6 + [4.0] * 40
    assert switches(losses, back=0.0, warmup=10)[0] == [9]
    losses = [3.0] * 12 + [4.0] * 40
    assert switches(losses, back=0.0, warmup=10)[0] == [9, 19, 29]


def test_a_fixed_step():
    rule = mkor.HybridSwitch(at_step=7)
    courses = [rule.arrive(Course(), steps).preconditioning for steps in range(1, 10)]
    assert courses == [True] * 6 + [False] * 3
    after = rule.arrive(Course(), 7)
    assert (after.since, rule.arrive(after, 8)) == (7, after) and rule.ended(after)


BAD = [
    ({"window": 0}, "window=0 is out of range: window must be an integer of at least 1"),
    ({"patience": 1.0}, "patience=1.0 is out of range: patience must be an integer of at least 1"),
    ({"warmup": -1}, "warmup=-1 is out of range: warmup must be an integer of at least 0"),
    ({"threshold": 1.0}, "threshold=1.0 is out of range: threshold must be between 0 and 1"),
    ({"smoothing": 1}, "smoothing=1 is out of range: smoothing must be at least 0 and below 1"),
    ({"back": -0.1}, "back=-0.1 is out of range: back must be at least 0 and finite, or None"),
    ({"at_step": 0}, "at_step=0 is out of range: at_step must be an integer of at least 1, or"),
    ({"at_step": 5, "back": 0.1}, "at_step and back exclude each other"),
]


@pytest.mark.parametrize(("options", "text"), BAD, ids=[text[:16] for _, text in BAD])
def test_options_out_of_range_are_refused(options, text):
    with pytest.raises(ValueError) as error:
        mkor.HybridSwitch(**options)
    assert text in str(error.value)
