"""Means over windows: what counts, and what is refused."""

import copy

import pytest
import torch

from mkor.meter import Meter
from test_no_sync import no_sync


def mean(*values):
    meter = Meter("the loss")
    for value in values:
        meter.add(value)
    return meter.take(None)


def test_values_may_be_numbers_and_tensors():
    assert mean(1, 2.0, torch.tensor(3.0), torch.tensor([6.0], dtype=torch.float64)) == 3.0
    assert mean(torch.tensor(2), torch.tensor(True)) == 1.5


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_values_that_are_not_finite_are_left_out(bad):
    assert mean(1.0, bad, torch.tensor(bad), torch.tensor(3.0)) == 2.0
    assert mean(bad, torch.tensor(bad)) is None
    assert mean() is None


def test_half_precision_is_added_up_wide():
    assert mean(*[torch.tensor(60000.0, dtype=torch.float16)] * 4) == 60000.0


def test_taking_starts_anew():
    meter = Meter("the loss")
    meter.add(5.0)
    assert (meter.take(None), meter.calls) == (5.0, 0)
    meter.add(1.0)
    assert meter.take(None) == 1.0


def test_adding_waits_for_nothing_and_keeps_no_graph():
    meter = Meter("the loss")
    loss = torch.ones((), requires_grad=True) * 2
    with no_sync():
        meter.add(loss)
        meter.add(loss)
    assert not meter.total.requires_grad and meter.take(None) == 2.0


def test_a_meter_goes_on_from_its_state():
    meter, other = Meter("the loss"), Meter("the loss")
    for value in (torch.tensor(0.1), float("nan"), torch.tensor(0.3)):
        meter.add(value)
    other.load_state_dict(copy.deepcopy(meter.state_dict()))
    for one in (meter, other):
        one.add(torch.tensor(0.7))
    assert other.calls == meter.calls == 4
    assert other.take(None) == meter.take(None)


def test_what_is_no_number_is_refused():
    with pytest.raises(ValueError, match=r"the loss has shape \(2,\): pass a single number"):
        mean(torch.ones(2))
    with pytest.raises(TypeError, match="the loss must be a number or a tensor of one, got str"):
        mean("low")


@pytest.mark.parametrize("cut", range(1, 6))
def test_a_sum_goes_on_after_a_checkpoint_to_the_last_bit(cut):
    values = [torch.rand((), generator=torch.Generator().manual_seed(n)) for n in range(6)]
    straight, saved, resumed = (Meter("the loss") for _ in range(3))
    for value in values:
        straight.add(value)
    for value in values[:cut]:
        saved.add(value)
    resumed.load_state_dict(saved.state_dict())
    for value in values[cut:]:
        resumed.add(value)
    assert resumed.take(None) == straight.take(None)


@pytest.mark.parametrize("saved", [True, False])
def test_a_sum_that_is_absorbed(saved):
    """As that of a step into that of a window; be both read from a checkpoint or not."""
    whole, own = Meter("the loss"), Meter("the loss")
    for meter, seeds in ((whole, range(3)), (own, range(3, 6))):
        for seed in seeds:
            meter.add(torch.rand((), generator=torch.Generator().manual_seed(seed)))
        if saved:
            meter.load_state_dict(meter.state_dict())
    whole.absorb(own)
    assert (own.calls, own.take(None)) == (0, None)
    sums = [
        sum(torch.rand((), generator=torch.Generator().manual_seed(s)).item() for s in seeds)
        for seeds in (range(3), range(3, 6))
    ]
    assert (whole.calls, whole.take(None)) == (6, (sums[0] + sums[1]) / 6)


@pytest.mark.parametrize("word", ["1.0", b"1", None, [1.0]], ids=str)
def test_a_value_that_is_no_number(word):
    kind = type(word).__name__
    with pytest.raises(
        TypeError, match=f"the loss must be a number or a tensor of one, got {kind}"
    ):
        Meter("the loss", least=0.0).add(word)


def test_a_number_beyond_all_floats_is_infinite():
    with pytest.raises(ValueError, match="the loss is inf: it must be finite and at least 0"):
        Meter("the loss", least=0.0).add(10**400)
