"""The knee-point scheduler: where knees are, what they change, and how it lives beside others."""

import copy
import logging
import math
import pickle

import pytest
import torch
from torch.optim import lr_scheduler

import mkor
from small_runs import backward, data, mlp, same, sgd
from test_no_sync import no_sync


def plain(lr=0.1, groups=1):
    params = [{"params": [torch.nn.Parameter(torch.ones(2))]} for _ in range(groups)]
    return torch.optim.SGD(params, lr=lr)


def rates(optimizer):
    return [float(group["lr"]) for group in optimizer.param_groups]


def knees(curve, optimizer=None, **options):
    """The calls after which the rate was lower."""
    optimizer = optimizer or plain()
    scheduler = mkor.KneePointLR(optimizer, **options)
    out, before = [], rates(optimizer)
    for call, metric in enumerate(curve):
        scheduler.step(metric)
        if rates(optimizer) != before:
            out.append(call)
            before = rates(optimizer)
    return out


def decaying(calls, time=10.0, least=1.0):
    return [least + math.exp(-t / time) for t in range(calls)]


def by_hand(curve, beta, decay, dwell):
    """The first knee from the formula, with sums in place of recursions."""
    for k in range(1, len(curve)):
        gains = [curve[j - 1] - curve[j] for j in range(1, k + 1)]
        weights = [decay ** (k - j) for j in range(1, k + 1)]
        rate = sum(w * g for w, g in zip(weights, gains, strict=True)) / sum(weights)
        if k >= dwell and rate < beta * (curve[0] - curve[k]) / k:
            return k
    return None


@pytest.mark.parametrize("beta", [0.05, 0.1, 0.5])
@pytest.mark.parametrize("decay", [0.0, 0.5, 0.9])
def test_the_first_knee_is_where_the_formula_has_it(beta, decay):
    curve = decaying(200)
    expected = by_hand(curve, beta, decay, 3)
    assert expected > 3
    assert knees(curve, beta=beta, decay=decay, dwell=3)[0] == expected


def test_a_metric_that_falls_evenly_has_no_knee():
    assert knees([100 - t for t in range(100)], dwell=2) == []


def test_a_metric_that_gets_faster_has_no_knee():
    assert knees([10000 - t * t for t in range(100)], dwell=2) == []


@pytest.mark.parametrize("slope", [0.0, 0.3])
def test_a_metric_that_does_not_improve_has_a_knee_after_the_dwell(slope):
    assert knees([5 + slope * t for t in range(10)], dwell=4) == [4, 8]


@pytest.mark.parametrize(("decay", "call"), [(0.9, 36), (0.7, 12)])
def test_how_long_a_fall_is_remembered(decay, call):
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler = mkor.KneePointLR(optimizer, decay=decay)
    for number in range(1, call + 1):
        assert scheduler.knees == 0, number
        scheduler.step(1.0 if number == 1 else 0.0)
    assert scheduler.knees == 1


def test_accuracy_is_to_rise():
    loss = decaying(100)
    falling = knees(loss, dwell=5)
    assert falling and knees([-value for value in loss], mode="max", dwell=5) == falling
    assert knees(loss, mode="max", dwell=5)[0] == 5


def test_rates_are_multiplied_down_to_the_floor():
    optimizer = plain(lr=0.8, groups=2)
    optimizer.param_groups[1]["lr"] = 0.01
    scheduler = mkor.KneePointLR(optimizer, factor=0.5, dwell=1, floor=[0.15, 0.02])
    seen = []
    for _ in range(5):
        scheduler.step(1.0)
        seen.append(rates(optimizer))
    assert seen == [[0.8, 0.01], [0.4, 0.01], [0.2, 0.01], [0.15, 0.01], [0.15, 0.01]]
    assert scheduler.get_last_lr() == scheduler.get_lr() == [0.15, 0.01]
    assert scheduler.knees == 4


def test_groups_that_come_later_are_lowered_too():
    optimizer = plain()
    scheduler = mkor.KneePointLR(optimizer, dwell=1)
    optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(1))], "lr": 1.0})
    scheduler.step(1.0)
    scheduler.step(1.0)
    assert rates(optimizer) == [0.05, 0.5]


def test_a_tensor_rate_stays_the_tensor_and_is_lowered_once():
    lr = torch.tensor(0.4)
    params = [{"params": [torch.nn.Parameter(torch.ones(2))]} for _ in range(2)]
    optimizer = torch.optim.AdamW(params, lr=lr)
    assert optimizer.param_groups[1]["lr"] is optimizer.param_groups[0]["lr"]
    scheduler = mkor.KneePointLR(optimizer, dwell=1, floor=0.1)
    scheduler.step(1.0)
    with no_sync():
        scheduler._lower()
    assert optimizer.param_groups[0]["lr"] is lr and lr.item() == pytest.approx(0.2)
    scheduler.step(2.0)
    scheduler.step(3.0)
    assert lr.item() == pytest.approx(0.1)
    assert scheduler.get_last_lr()[0] is not lr


def test_metrics_are_averaged_over_a_window_and_read_once_in_it():
    noise = [1.0, -1.0, 0.5, -0.5]
    curve = [m + 0.5 * noise[i] for m in decaying(60) for i in range(4)]
    smooth = knees(decaying(60), dwell=5)
    assert knees(curve, window=4, dwell=20) == [4 * k + 3 for k in smooth]
    scheduler = mkor.KneePointLR(plain(), window=3)
    values = [torch.tensor(v) for v in (3.0, 2.0, 1.0)]
    with no_sync():
        scheduler.step(values[0])
        scheduler.step(values[1])
    with pytest.raises(AssertionError, match="reads a tensor's value"), no_sync():
        scheduler.step(values[2])


def test_metrics_that_are_not_finite_are_left_out():
    curve = decaying(80)
    broken = [value for metric in curve for value in (metric, float("nan"))]
    expected = knees(curve, dwell=5)
    assert [k // 2 for k in knees(broken, window=2, dwell=10)] == expected


@pytest.mark.parametrize("window", [1, 2])
@pytest.mark.parametrize("bad", [float("nan"), torch.tensor(float("inf"))])
def test_windows_without_a_finite_metric_are_told(window, bad, caplog):
    scheduler = mkor.KneePointLR(plain(), dwell=1, window=window)
    for _ in range(window):
        scheduler.step(1.0)
    with pytest.warns(UserWarning, match="of the .* up to call .* none was") as warned:
        for _ in range(3 * window):
            scheduler.step(bad)
    assert len(warned) == 1 and warned[0].filename == __file__
    assert f"of the {window} that KneePointLR was shown up to call {2 * window} none" in str(
        warned[0].message
    )
    assert scheduler.knees == 0 and rates(scheduler.optimizer) == [0.1]
    lines = [record.getMessage() for record in caplog.records]
    assert lines == [
        f"metric left out: call={call * window} metrics={window} of={window}" for call in (2, 3, 4)
    ]
    copy.deepcopy(scheduler).load_state_dict(scheduler.state_dict())


def test_a_knee_is_one_line_in_the_log(caplog):
    caplog.set_level(logging.INFO, "mkor")
    scheduler = mkor.KneePointLR(plain(lr=0.25), dwell=2)
    for _ in range(4):
        scheduler.step(3.0)
    assert [record.getMessage() for record in caplog.records] == [
        "knee: call=3 metric=3 knees=1 lr=0.125"
    ]


def test_the_start_may_be_left_out():
    curve = [50.0, 10.0, 3.0, *decaying(80)]
    assert knees(curve, warmup=3, dwell=5) == [k + 3 for k in knees(decaying(80), dwell=5)]


@pytest.mark.parametrize("cut", [1, 7, 30, 41])
def test_a_resumed_scheduler_goes_on_exactly(cut):
    def parts():
        optimizer = plain(groups=2)
        return optimizer, mkor.KneePointLR(optimizer, window=3, dwell=6, beta=0.6)

    curve = [torch.tensor(m) for m in decaying(90)]
    optimizer, scheduler = parts()
    for metric in curve[:cut]:
        scheduler.step(metric)
    saved = copy.deepcopy((optimizer.state_dict(), scheduler.state_dict()))
    copied = copy.deepcopy((optimizer, scheduler))
    pickled = pickle.loads(pickle.dumps((optimizer, scheduler)))
    resumed = parts()
    resumed[0].load_state_dict(saved[0])
    resumed[1].load_state_dict(saved[1])
    for metric in curve[cut:]:
        for one in (scheduler, resumed[1], copied[1], pickled[1]):
            one.step(metric)
    assert scheduler.knees >= 1
    for other in (resumed, copied, pickled):
        assert rates(other[0]) == rates(optimizer)
        assert other[1].state_dict() == scheduler.state_dict()


def test_a_state_is_read_with_weights_only(tmp_path):
    optimizer = plain(lr=torch.tensor(0.1))
    scheduler = mkor.KneePointLR(optimizer, window=4)
    scheduler.step(torch.tensor(1.0))
    torch.save(scheduler.state_dict(), tmp_path / "state")
    scheduler.load_state_dict(torch.load(tmp_path / "state", weights_only=True))
    assert scheduler.meter.calls == 1


def test_it_drives_the_wrapper_and_its_base_alike():
    ends = []
    for on_base in (False, True):
        model = mlp()
        optimizer = sgd(model)
        scheduler = mkor.KneePointLR(optimizer.base if on_base else optimizer, dwell=2, beta=0.9)
        for batch in data(12):
            loss = backward(model, batch)
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step(loss)
        assert scheduler.knees > 0 and rates(optimizer)[0] < 0.1
        ends.append(model)
    assert same(*ends)


def together(make, calls=16, beside=True):
    """Rates at a flat metric, with another scheduler stepped before."""
    optimizer = plain(lr=1.0)
    other = make(optimizer)
    known = {"beside": other} if beside else {}
    scheduler = mkor.KneePointLR(optimizer, dwell=5, warmup=4, **known)
    seen = []
    for _ in range(calls):
        optimizer.step()
        other.step()
        scheduler.step(1.0)
        seen += rates(optimizer)
    return seen


def test_a_warm_up_that_goes_on_from_the_present_rate_needs_nothing():
    seen = together(lambda o: lr_scheduler.LinearLR(o, 0.25, total_iters=4), beside=False)
    assert seen[3:9] == pytest.approx([1.0] * 6)
    assert seen[9:14] == pytest.approx([0.5] * 5)
    assert seen[14] == pytest.approx(0.25)


def warm(step):
    return min(1.0, (step + 1) / 4)


@pytest.mark.parametrize(
    "make",
    [
        lambda o: lr_scheduler.LambdaLR(o, warm),
        lambda o: lr_scheduler.ChainedScheduler([lr_scheduler.LambdaLR(o, warm)], o),
        lambda o: lr_scheduler.SequentialLR(
            o, [lr_scheduler.LambdaLR(o, warm), lr_scheduler.LambdaLR(o, lambda _: 1.0)], [5]
        ),
    ],
)
def test_base_rates_of_a_scheduler_beside_are_lowered(make):
    seen = together(make)
    assert seen[3:9] == pytest.approx([1.0] * 6)
    assert seen[9:14] == pytest.approx([0.5] * 5)
    assert seen[14:] == pytest.approx([0.25] * 2)


def within(kind):
    """An optimizer, a scheduler that holds a warm-up and the knee-point one, and the latter."""
    optimizer = plain(lr=1.0)
    warm_up = lr_scheduler.LinearLR(optimizer, 0.25, total_iters=4)
    if kind == "sequential":
        knee = mkor.KneePointLR(optimizer, dwell=5)
        return optimizer, lr_scheduler.SequentialLR(optimizer, [warm_up, knee], [4]), knee
    knee = mkor.KneePointLR(optimizer, dwell=5, warmup=4)
    return optimizer, lr_scheduler.ChainedScheduler([warm_up, knee], optimizer), knee


def observed(optimizer, scheduler, knee, calls):
    """The rates after calls at a flat metric."""
    seen = []
    for _ in range(calls):
        optimizer.step()
        knee.observe(torch.tensor(1.0, requires_grad=True))
        scheduler.step()
        seen += rates(optimizer)
        assert scheduler.get_last_lr() == rates(optimizer)
    return seen


@pytest.mark.parametrize("kind", ["sequential", "chained"])
def test_inside_others_it_does_what_it_does_beside_them(kind):
    expected = together(lambda o: lr_scheduler.LinearLR(o, 0.25, total_iters=4), beside=False)
    assert observed(*within(kind), 16) == pytest.approx(expected)


@pytest.mark.parametrize("kind", ["sequential", "chained"])
@pytest.mark.parametrize("cut", [0, 2, 4, 6, 12])
def test_inside_others_it_resumes_exactly(kind, cut, tmp_path):
    expected = observed(*within(kind), 16)
    optimizer, scheduler, knee = within(kind)
    observed(optimizer, scheduler, knee, cut)
    torch.save((optimizer.state_dict(), scheduler.state_dict()), tmp_path / "state")
    resumed = within(kind)
    for one, state in zip(resumed, torch.load(tmp_path / "state", weights_only=True), strict=False):
        one.load_state_dict(state)
    assert observed(*resumed, 16 - cut) == expected[cut:]


def test_two_of_them_may_follow_each_other():
    optimizer = plain(lr=torch.tensor(1.0))
    first, second = (mkor.KneePointLR(optimizer, dwell=2, factor=f) for f in (0.5, 0.1))
    scheduler = lr_scheduler.SequentialLR(optimizer, [first, second], [4])
    seen = []
    for _ in range(8):
        optimizer.step()
        for knee in (first, second):
            knee.observe(1.0)
        scheduler.step()
        seen += rates(optimizer)
    assert seen == pytest.approx([1.0, 1.0, 0.5, 1.0, 1.0, 1.0, 0.1, 0.1])


def test_older_torch_begins_it_by_a_step_at_epoch_zero():
    optimizer, _, knee = within("sequential")
    assert rates(optimizer) == [0.25] and knee.last_epoch < 0
    knee.step(0)
    assert rates(optimizer) == [1.0] and knee.last_epoch == 0
    assert knee.meter.calls == 0


def test_a_metric_that_was_observed_counts_once():
    scheduler = mkor.KneePointLR(plain())
    scheduler.observe(1.0)
    scheduler.step()
    with pytest.raises(TypeError, match=r"such as SequentialLR, call observe\(loss\) before"):
        scheduler.step()
    with pytest.raises(ValueError, match=r"the metric has shape \(2,\): pass a single number"):
        scheduler.observe(torch.ones(2))
    with pytest.raises(TypeError, match="the metric must be a number or a tensor of one, got list"):
        scheduler.observe([0.1])


def test_groups_that_come_later_have_no_base_rate_beside():
    optimizer = plain(lr=1.0)
    other = lr_scheduler.LambdaLR(optimizer, warm)
    scheduler = mkor.KneePointLR(optimizer, dwell=1, beside=other)
    optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(1))], "lr": 0.4})
    scheduler.step(1.0)
    scheduler.step(1.0)
    assert other.base_lrs == [0.5] and rates(optimizer) == [0.125, 0.2]


def test_the_metric_may_be_negative_and_a_number_that_is_not_finite_is_left_out():
    curve = [value - 5 for value in decaying(80)]
    assert knees(curve, dwell=5) == knees(decaying(80), dwell=5)
    broken = [value for metric in curve for value in (metric, float("nan"))]
    assert [k // 2 for k in knees(broken, window=2, dwell=10)] == knees(curve, dwell=5)


def test_a_scheduler_in_place_of_the_optimizer_is_refused():
    with pytest.raises(TypeError, match=r"must be a torch\.optim\.Optimizer, got LambdaLR"):
        mkor.KneePointLR(lr_scheduler.LambdaLR(plain(), warm))


def test_it_multiplies_onto_a_schedule_beside():
    def cosine(step):
        return 0.5 * (1 + math.cos(math.pi * step / 40))

    optimizer = plain(lr=1.0)
    other = lr_scheduler.LambdaLR(optimizer, cosine)
    scheduler = mkor.KneePointLR(optimizer, dwell=10, beside=other)
    for call in range(1, 31):
        optimizer.step()
        other.step()
        scheduler.step(1.0)
        assert rates(optimizer)[0] == pytest.approx(cosine(call) * 0.5**scheduler.knees)
    assert scheduler.knees == 2


BAD = [
    ({"beta": 0.0}, "beta=0.0 is out of range: beta must be between 0 and 1"),
    ({"beta": "0.1"}, "beta='0.1' is out of range"),
    ({"factor": 1.0}, "factor=1.0 is out of range: factor must be between 0 and 1"),
    ({"decay": 1.0}, "decay=1.0 is out of range: decay must be at least 0 and below 1"),
    ({"dwell": 0}, "dwell=0 is out of range: dwell must be an integer of at least 1"),
    ({"window": 1.5}, "window=1.5 is out of range: window must be an integer of at least 1"),
    ({"warmup": -1}, "warmup=-1 is out of range: warmup must be an integer of at least 0"),
    ({"mode": "mim"}, "mode='mim' is unknown: choose from 'min', 'max'; did you mean 'min'?"),
    ({"floor": -1.0}, "floor=-1.0 is out of range: floor must be at least 0 and finite"),
    ({"floor": [0.1, 0.1]}, "has 2 values for 1 parameter groups: pass a single number"),
]


@pytest.mark.parametrize(("options", "text"), BAD, ids=[text[:18] for _, text in BAD])
def test_options_out_of_range_are_refused(options, text):
    with pytest.raises(ValueError) as error:
        mkor.KneePointLR(plain(), **options)
    assert text in str(error.value)


def test_wrong_types_are_refused():
    with pytest.raises(TypeError, match=r"optimizer must be a torch\.optim\.Optimizer, got list"):
        mkor.KneePointLR([])
    with pytest.raises(TypeError, match=r"beside must be .*LRScheduler, got int"):
        mkor.KneePointLR(plain(), beside=3)
    foreign = lr_scheduler.LambdaLR(plain(), warm)
    with pytest.raises(ValueError, match="beside is a LambdaLR of another optimizer"):
        mkor.KneePointLR(plain(), beside=foreign)
    scheduler = mkor.KneePointLR(plain())
    with pytest.raises(TypeError, match="needs the metric: call step"):
        scheduler.step()
    with pytest.raises(ValueError, match=r"the metric has shape \(2,\)"):
        scheduler.step(torch.ones(2))
    with pytest.raises(TypeError, match=r"number or a tensor of one, got torch\.complex64"):
        scheduler.step(torch.ones((), dtype=torch.complex64))
    with pytest.raises(TypeError, match=r"state_dict must be a dict .* got NoneType"):
        scheduler.load_state_dict(None)
    with pytest.raises(ValueError, match=r"it lacks .*beta"):
        scheduler.load_state_dict({"last_epoch": 3})
