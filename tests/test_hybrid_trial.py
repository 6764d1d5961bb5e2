"""A hand-over on trial: the base works alone for a few windows and must be as fast a second."""

import copy
import logging
import pickle
import statistics

import pytest
import torch

from mkor.hybrid import Course, HybridSwitch
from mkor.meter import Meter, Stopwatch
from small_runs import backward, data, same
from test_hybrid import build, every_method, hooks, step


class Clock:
    """A clock that a test sets."""

    def __init__(self, now=0.0):
        self.now = now

    def __call__(self):
        return self.now


def follow(rule, windows):
    """Phases ("method", "trial", "base") after each window of a mean loss and a time."""
    course, phases = Course(), []
    for number, (loss, seconds) in enumerate(windows, 1):
        course = rule.follow(course, number, loss, seconds)
        trial = "trial" if course.pace is not None else "method"
        phases.append(trial if course.preconditioning else "base")
    return phases, course


RULE = HybridSwitch(window=1, patience=1, smoothing=0.0, threshold=0.5, trial=3)
# Falls of the method: 20 % in the second window, then 5 %, which speaks for the base.
METHOD = [(1.0, 2.0), (0.8, 2.0), (0.76, 2.0)]


def trial(fall, seconds):
    """Three windows of the base alone, with this relative fall in each after the first."""
    return [(0.75 * (1 - fall) ** k, seconds) for k in range(3)]


@pytest.mark.parametrize("seconds", [0.5, 1.0, 1.5, 2.0])
@pytest.mark.parametrize("side", [0.98, 1.02])
def test_the_base_takes_over_where_its_loss_falls_as_much_a_second(seconds, side):
    """With the measured ratio of times ρ the base must fall at least 1/ρ as much a step."""
    ratio = 2.0 / seconds
    fall = side * 0.05 / ratio
    phases, course = follow(RULE, METHOD + trial(fall, seconds))
    assert phases[2:5] == ["trial"] * 3
    assert phases[5] == ("base" if side > 1 else "method")
    assert course.trials == (0 if side > 1 else 1)


def test_a_method_that_buys_nothing_needs_no_trial():
    flat = [(1.0, 2.0), (0.8, 2.0), (0.8, 2.0)]
    assert follow(RULE, flat)[0] == ["method", "method", "base"]


def test_a_base_whose_loss_rises_loses_the_trial():
    assert follow(RULE, METHOD + trial(-0.1, 0.01))[0][-1] == "method"


def test_each_lost_trial_doubles_the_patience():
    lost = trial(0.0, 2.0)
    slow = [(0.75 * 0.95**k, 2.0) for k in range(8)]
    phases, course = follow(RULE, METHOD + lost + slow[:3] + lost + slow[:5] + lost)
    # The first window after a trial sets the level, then 2 and 4 windows speak.
    assert phases[5:9] == ["method"] * 3 + ["trial"]
    assert phases[11:17] == ["method"] * 5 + ["trial"]
    assert course.trials == 3 and course.reference == pytest.approx(0.2)


def test_a_pause_in_one_window_changes_nothing():
    rule = HybridSwitch(window=1, patience=3, smoothing=0.0, threshold=0.5, trial=4)
    method = [(1.0, 2.0), (0.8, 2.0)] + [(0.8 * 0.95**k, 2.0) for k in range(1, 4)]
    base = [(0.68 * 0.97**k, 1.0) for k in range(4)]
    expected, _ = follow(rule, method + base)
    assert expected[4:] == ["trial"] * 4 + ["base"]
    for number in range(len(method + base)):
        paused = [(loss, t + 100 * (i == number)) for i, (loss, t) in enumerate(method + base)]
        assert follow(rule, paused)[0] == expected


def test_after_the_way_back_there_is_another_trial():
    rule = HybridSwitch(window=1, patience=1, smoothing=0.0, threshold=0.5, trial=2, back=0.1)
    windows = [*METHOD, (0.75, 1.0), (0.7, 1.0), (0.9, 1.0), (0.72, 2.0), (0.684, 2.0)]
    assert follow(rule, windows)[0][3:] == ["trial", "base", "method", "method", "trial"]


def run(pair, clock, batches, losses, seconds):
    """Steps with losses and durations that are given; the phase after each."""
    phases = []
    for batch, loss, duration in zip(batches, losses, seconds, strict=True):
        clock.now += duration
        step(*pair, batch, loss)
        engine = pair[1]._engine
        phases.append("base" if engine.resting else "trial" if engine.paused else "method")
    return phases


# Windows of two steps: 1, 0.8, 0.76, trial at 0.75, …
LOSSES = [value for loss in (1.0, 0.8, 0.76, 0.75, 0.73, 0.73, 0.72) for value in (loss, loss)]
TRIAL = {"window": 2, "patience": 1, "smoothing": 0.0, "threshold": 0.5, "trial": 2}
WON, LOST = [1.0] * 6 + [0.4] * 8, [1.0] * 14


@every_method
def test_a_step_on_trial_is_the_bases_and_the_factors_stay(method):
    clock = Clock()
    model, optimizer = build(method, **TRIAL, clock=clock)
    assert run((model, optimizer), clock, data(6), LOSSES[:6], WON[:6])[-1] == "trial"
    kept = copy.deepcopy(optimizer.state_dict()["preconditioner"]["layers"])
    assert not any(info.preconditioned for info in optimizer.layers())
    assert all("on trial" in info.reason and info.bytes for info in optimizer.layers())
    for number, batch in enumerate(data(9)[6:8]):
        clock.now += 0.4
        optimizer.zero_grad()
        backward(model, batch)
        optimizer.observe_loss(LOSSES[6 + number])
        grads = [p.grad.clone() for p in model.parameters()]
        optimizer.step()
        assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), grads, strict=True))
    now = optimizer.state_dict()["preconditioner"]["layers"]
    for name, layer in kept.items():
        assert layer["updates"] == now[name]["updates"] > 0
        for key, tensor in layer["state"].items():
            assert torch.equal(tensor, now[name]["state"][key])
    assert hooks(model) > 0


@every_method
@pytest.mark.parametrize(("seconds", "end"), [(WON, "base"), (LOST, "method")])
def test_the_measured_time_decides(method, seconds, end):
    clock = Clock()
    pair = build(method, **TRIAL, clock=clock)
    phases = run(pair, clock, data(14), LOSSES, seconds)
    assert phases[:10] == ["method"] * 5 + ["trial"] * 4 + [end]
    assert hooks(pair[0]) == 0 if end == "base" else hooks(pair[0]) > 0
    before = [info.updates for info in pair[1].layers()]
    run(pair, clock, data(4), [0.7] * 4, [1.0] * 4)
    if end == "method":  # factors are updated again
        assert all(
            b > a for a, b in zip(before, [i.updates for i in pair[1].layers()], strict=True)
        )


@pytest.mark.parametrize("cut", range(1, 14))
@pytest.mark.parametrize("method", ["mkor", "kfac", "hylo"])
@pytest.mark.parametrize("seconds", [WON, LOST])
def test_resuming_at_any_step_of_a_trial_is_exact(method, seconds, cut, tmp_path):
    def start(now=0.0):
        clock = Clock(now)
        return build(method, **TRIAL, clock=clock), clock

    straight, clock = start()
    expected = run(straight, clock, data(14), LOSSES, seconds)
    first, clock = start()
    run(first, clock, data(14)[:cut], LOSSES[:cut], seconds[:cut])
    torch.save([part.state_dict() for part in first], tmp_path / "saved")
    resumed, other = start(1000.0)
    for part, state in zip(resumed, torch.load(tmp_path / "saved", weights_only=True), strict=True):
        part.load_state_dict(state)
    copied = pickle.loads(pickle.dumps(first))  # its clock, too
    ends = [(first, clock), (resumed, other), (copied, copied[1]._handover.watch.clock)]
    for pair, own in ends:
        rest = (data(14)[cut:], LOSSES[cut:], seconds[cut:])
        assert run(pair, own, *rest) == expected[cut:]
        assert same(pair[0], straight[0])
        assert pair[1].layers() == straight[1].layers()


def test_the_trial_is_told_in_the_log(caplog):
    clock = Clock()
    pair = build(**TRIAL, clock=clock)
    with caplog.at_level(logging.INFO, logger="mkor"):
        run(pair, clock, data(14), LOSSES, WON)
    assert caplog.messages == [
        "hybrid switch: phase=base optimizer on trial step=6 after=6 loss=0.76",
        "hybrid switch: phase=base optimizer alone step=10 after=10 loss=0.73",
    ]
    caplog.clear()
    clock = Clock()
    with caplog.at_level(logging.INFO, logger="mkor"):
        run(build(**TRIAL, clock=clock), clock, data(10), LOSSES[:10], LOST[:10])
    assert caplog.messages[1] == "hybrid switch: phase=preconditioning step=10 after=10 loss=unseen"


def test_a_real_clock_is_read_once_a_window(monkeypatch):
    reads = []
    _, optimizer = pair = build(**TRIAL, clock=lambda: reads.append(1) or float(len(reads)))
    start = len(reads)
    for number, batch in enumerate(data(6), 1):
        step(*pair, batch, 1.0 / number)
        # At the end of a window: its time is taken and the next one begins.
        assert len(reads) - start == number // 2 * 2
    assert optimizer._handover.watch.clock is optimizer._handover.rule.clock


def test_a_stopwatch_goes_on_in_a_copy():
    clock = Clock(10.0)
    watch = Stopwatch(clock)
    clock.now = 13.0
    copied = pickle.loads(pickle.dumps(watch))
    copied.clock.now = 15.0  # its own clock, which went on by two
    assert watch.seconds() == 3.0 and copied.seconds() == 5.0


def test_times_are_averaged_over_windows_by_their_median():
    times = Meter("the time of a window")
    times.add(2.0)
    assert times.take(None) == 2.0
    seconds = [1.0, 2.0, 9.0, 1.7, 1.5, 1.8]
    windows = [(2.0**-k, s) for k, s in enumerate(seconds)]
    _, course = follow(HybridSwitch(window=1, trial=2), windows)
    assert statistics.median(course.seconds) == 1.8  # of the last five


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"trial": 1}, "trial=1 is out of range: trial must be an integer of at least 2, or None"),
        ({"trial": 2, "at_step": 5}, "at_step and trial exclude each other"),
    ],
)
def test_options_out_of_range_are_refused(options, text):
    with pytest.raises(ValueError, match=text):
        HybridSwitch(**options)
    with pytest.raises(TypeError, match="clock must be a function that returns seconds, got 3"):
        HybridSwitch(clock=3)
