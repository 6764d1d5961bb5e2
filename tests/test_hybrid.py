"""The hybrid switch on a network: what is freed, what goes on, what a checkpoint remembers."""

import copy
import logging
import pickle

import pytest
import torch
from torch import nn

import mkor
from mkor.hybrid import HybridSwitch
from small_runs import backward, data, mlp, same
from test_no_sync import no_sync

METHODS = {
    "mkor": (mkor.MKOR, {}),
    "kfac": (mkor.KFAC, {}),
    "eva": (mkor.Eva, {}),
    "sngd": (mkor.SNGD, {}),
    "hylo": (mkor.HyLo, {"rank": 0.5, "switch_steps": 2}),
    "kbfgs": (mkor.KBFGS, {}),
}
every_method = pytest.mark.parametrize("method", METHODS)
two_methods = pytest.mark.parametrize("method", ["mkor", "kfac"])

FLAT = {
    "window": 2,
    "patience": 1,
    "smoothing": 0.0,
}  # hands over after 4 steps of a loss that doesn't fall


def adam(model):
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1)


def build(method="mkor", base=adam, **options):
    """A model and the method on it; with a switch if there are options of one."""
    model = mlp()
    cls, own = METHODS[method]
    hybrid = HybridSwitch(**options) if options else None
    schedule = {"factor_update_steps": 2, "warmup_steps": 1}
    return model, cls(model, base(model), **schedule, hybrid=hybrid, **own)


def step(model, optimizer, batch, loss=None):
    """One step by a closure; shows the switch `loss` in place of the batch's, if given."""

    def closure():
        optimizer.zero_grad()
        real = backward(model, batch)
        return real if loss is None else torch.tensor(loss)

    return optimizer.step(closure)


def train(model, optimizer, batches, losses=None):
    for number, batch in enumerate(batches):
        step(model, optimizer, batch, None if losses is None else losses[number])


def hooks(model):
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()) + sum(
        len(p._post_accumulate_grad_hooks or ()) for p in model.parameters()
    )


def held(optimizer):
    """Bytes of curvature and of statistics."""
    layers = optimizer.state_dict()["preconditioner"]["layers"].values()
    states = [t for layer in layers for t in layer["state"].values()]
    assert sum(t.nbytes for t in states) in (0, sum(i.bytes for i in optimizer.layers()))
    return sum(t.nbytes for t in states) + len(optimizer._engine.capture.leaves)


@every_method
def test_after_the_hand_over_there_is_nothing_left(method):
    model, optimizer = build(method, **FLAT)
    train(model, optimizer, data(3), [1.0] * 3)
    assert hooks(model) > 0 and held(optimizer) > 0
    assert all(info.preconditioned for info in optimizer.layers())
    train(model, optimizer, data(1), [1.0])
    assert hooks(model) == 0 == held(optimizer)
    for info in optimizer.layers():
        assert (info.preconditioned, info.bytes) == (False, 0)
        assert info.reason == "handed over to the base optimizer after 4 steps"
    assert "2 x handed over to the base optimizer after 4 steps" in repr(optimizer)
    train(model, optimizer, data(20), [100.0] * 20)  # whatever comes
    assert hooks(model) == 0 == held(optimizer)


@every_method
def test_the_state_is_freed(method):
    import gc
    import weakref

    model, optimizer = build(method, **FLAT)
    train(model, optimizer, data(3), [1.0] * 3)
    records = optimizer._engine.records.values()
    tensors = [weakref.ref(t) for record in records for t in record.state.values()]
    assert tensors
    del records
    train(model, optimizer, data(2), [1.0] * 2)
    gc.collect()
    assert [t for t in tensors if t() is not None] == []


@every_method
def test_a_step_after_the_hand_over_is_the_bases(method):
    model, optimizer = build(method, **FLAT)
    train(model, optimizer, data(4), [1.0] * 4)
    twin = mlp()
    twin.load_state_dict(model.state_dict())
    plain = adam(twin)
    plain.load_state_dict(copy.deepcopy(optimizer.base.state_dict()))
    for batch in data(5):
        for m, o in ((model, optimizer), (twin, plain)):
            o.zero_grad()
            backward(m, batch)
        grads = [p.grad.clone() for p in model.parameters()]
        optimizer.step()  # K-BFGS, too, does without a closure now
        plain.step()
        for p, grad in zip(model.parameters(), grads, strict=True):
            assert torch.equal(p.grad, grad)
    assert same(model, twin)


def operations(model, optimizer, batch):
    """Number of tensor operations of a step, its backward pass included."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Count(TorchDispatchMode):
        number = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.number += func.namespace == "aten"
            return func(*args, **(kwargs or {}))

    with Count() as count:
        backward(model, batch)
        optimizer.step()
        optimizer.zero_grad()
    return count.number


@two_methods
def test_a_step_after_the_hand_over_costs_what_the_bases_does(method):
    model, optimizer = build(method, **FLAT)
    train(model, optimizer, data(4), [1.0] * 4)
    twin = mlp()
    plain = adam(twin)
    train(twin, plain, data(1))
    for batch in data(4):
        assert operations(model, optimizer, batch) == operations(twin, plain, batch)


@two_methods
def test_a_loss_that_is_observed_counts_as_a_closures(method):
    by_closure, observed = build(method, **FLAT), build(method, **FLAT)
    losses = [3.0, 2.0, 1.0, 0.5, 0.4, 0.5, 0.5, 0.5]
    train(*by_closure, data(8), losses)
    model, optimizer = observed
    for batch, loss in zip(data(8), losses, strict=True):
        optimizer.zero_grad()
        backward(model, batch)
        optimizer.observe_loss(torch.tensor(loss) - 0.125)  # micro-batches, averaged
        optimizer.observe_loss(loss + 0.125)
        optimizer.step()
    assert same(model, by_closure[0])
    assert optimizer._engine.resting == by_closure[1]._engine.resting == 8


def test_a_step_by_precondition_alone_counts():
    model, optimizer = build(**FLAT)
    for batch in data(5):
        optimizer.zero_grad()
        backward(model, batch)
        optimizer.observe_loss(1.0)
        optimizer.precondition()
        optimizer.base.step()
    assert optimizer._engine.resting == 4 and hooks(model) == 0


def test_lbfgs_hands_over_too():
    model = mlp()
    base = torch.optim.LBFGS(model.parameters(), max_iter=3)
    optimizer = mkor.MKOR(model, base, hybrid=HybridSwitch(at_step=2))
    train(model, optimizer, data(4))
    assert optimizer._engine.resting == 2 and hooks(model) == 0


@two_methods
def test_a_fixed_step_needs_no_loss(method):
    model, optimizer = build(method, at_step=3)
    twin, other = build(method)
    for batch in data(3):
        for m, o in ((model, optimizer), (twin, other)):
            o.zero_grad()
            backward(m, batch)
            o.step()
    assert same(model, twin)  # three steps are preconditioned
    assert optimizer._engine.resting == 3 and hooks(model) == 0
    assert optimizer.observe_loss(torch.ones(2)) is None  # not looked at any more


def test_a_real_loss_that_flattens_hands_over():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3))
    teacher = nn.Linear(5, 3)
    base = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    optimizer = mkor.MKOR(model, base, hybrid=HybridSwitch(window=10))
    source = torch.Generator().manual_seed(1)
    for _ in range(400):
        rows = torch.randn(32, 5, generator=source)
        goal = teacher(rows).detach() + 0.3 * torch.randn(32, 3, generator=source)
        optimizer.zero_grad()
        loss = (model(rows) - goal).square().mean()
        loss.backward()
        optimizer.observe_loss(loss)
        optimizer.step()
    assert 30 <= optimizer._engine.resting <= 200
    assert loss < 0.2


@every_method
def test_the_way_back_installs_new_factors(method):
    model, optimizer = build(method, **FLAT, back=0.1)
    before = hooks(model)
    train(model, optimizer, data(4), [1.0] * 4)
    assert hooks(model) == 0
    train(model, optimizer, data(2), [2.0] * 2)
    assert hooks(model) == before and optimizer._engine.resting is None
    train(model, optimizer, data(2), [1.0] * 2)
    assert hooks(model) == before
    for info in optimizer.layers():
        assert info.preconditioned and info.updates == 1 and info.last_update == 6
    assert held(optimizer) > 0


def test_groups_that_come_after_the_hand_over_get_no_hooks():
    model = mlp()
    base = torch.optim.SGD(model[0].parameters(), lr=0.1)
    hybrid = HybridSwitch(**FLAT, back=0.1)
    optimizer = mkor.MKOR(model, base, hybrid=hybrid, factor_update_steps=2, warmup_steps=1)
    train(model, optimizer, data(4), [1.0] * 4)
    optimizer.add_param_group({"params": model[2].parameters()})
    assert hooks(model) == 0
    assert [info.bytes for info in optimizer.layers()] == [0, 0]
    train(model, optimizer, data(4), [2.0, 2.0, 1.0, 1.0])
    assert [info.updates for info in optimizer.layers()] == [1, 1]


# Means of pairs: 2.95, 2.9, 3.1 hands over, 3.5 goes back, 0.75, 0.5, 0.5 hands over again.
COURSE = [3.0, 2.9, 2.9, 2.9, 2.9, 3.3, 3.5, 3.5, 1.0, *[0.5] * 7]


def follow(pair, first, last):
    """Steps `first` to `last` of that course."""
    model, optimizer = pair
    for batch, loss in list(zip(data(16), COURSE, strict=True))[first:last]:
        optimizer.zero_grad()
        backward(model, batch)
        optimizer.observe_loss(torch.tensor(loss))
        optimizer.step()


@pytest.mark.parametrize("cut", [1, 3, 5, 6, 7, 8, 9, 13, 14, 15])
@pytest.mark.parametrize("method", ["mkor", "kfac", "hylo"])
def test_resuming_across_the_switch_is_exact(method, cut, tmp_path):
    straight, start = (build(method, **FLAT, back=0.1) for _ in range(2))
    follow(straight, 0, 16)
    assert straight[1]._engine.resting == 14
    follow(start, 0, cut)
    assert (start[1]._engine.resting is None) == (cut < 6 or 8 <= cut < 14)
    torch.save([part.state_dict() for part in start], tmp_path / "saved")
    resumed = build(method, **FLAT, back=0.1)
    for part, state in zip(resumed, torch.load(tmp_path / "saved", weights_only=True), strict=True):
        part.load_state_dict(state)
    copied, pickled = copy.deepcopy(start), pickle.loads(pickle.dumps(start))
    assert len({hooks(pair[0]) for pair in (start, resumed, copied, pickled)}) == 1
    for pair in (start, resumed, copied, pickled):
        follow(pair, cut, 16)
        assert same(pair[0], straight[0])
        assert pair[1]._handover.state_dict() == straight[1]._handover.state_dict()
        assert pair[1].layers() == straight[1].layers()
        assert hooks(pair[0]) == 0


def test_a_checkpoint_from_after_the_hand_over_needs_a_switch():
    model, optimizer = build(**FLAT)
    train(model, optimizer, data(4), [1.0] * 4)
    saved = copy.deepcopy(optimizer.state_dict())
    twin, other = build()
    with pytest.raises(ValueError, match="saved after its hybrid switch had handed over"):
        other.load_state_dict(saved)
    other.load_state_dict(saved, strict=False)
    assert hooks(twin) > 0
    train(twin, other, data(2))
    assert [info.preconditioned for info in other.layers()] == [True, True]


def test_a_checkpoint_from_before_takes_a_switch_that_rests_back():
    model, optimizer = build(**FLAT)
    _, other = build()
    before = copy.deepcopy(optimizer.state_dict())
    train(model, optimizer, data(4), [1.0] * 4)
    for saved in (before, other.state_dict()):
        optimizer.load_state_dict(copy.deepcopy(saved))
        assert optimizer._engine.resting is None and hooks(model) == 2
        train(model, optimizer, data(4), [1.0] * 4)
        assert optimizer._engine.resting == 4


def test_a_checkpoint_of_another_method_starts_the_switch_anew():
    model, optimizer = build("mkor", **FLAT)
    train(model, optimizer, data(4), [1.0] * 4)
    _, other = build("kfac", **FLAT)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()), strict=False)
    assert other._engine.resting is None and other._handover.course.loss is None


def test_without_a_loss_it_warns_once():
    model, optimizer = build(window=3)

    def go(steps):
        for batch in data(steps):
            optimizer.zero_grad()
            backward(model, batch)
            optimizer.step()

    go(2)
    with pytest.warns(UserWarning, match=r"has seen no loss in 3 steps.*observe_loss\(loss\)") as w:
        go(1)
    assert len(w) == 1 and w[0].filename == __file__
    go(9)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -1.0])
def test_tensors_that_are_no_losses_say_nothing_but_are_told(bad, caplog):
    model, optimizer = build(**FLAT)
    with pytest.warns(UserWarning, match=r"2 losses, none of them finite .* in 2 steps") as told:
        train(model, optimizer, data(8), [bad] * 8)
    assert len(told) == 1
    assert optimizer._engine.resting is None
    lines = [f"loss left out: step={step} losses=2 of=2" for step in (2, 4, 6, 8)]
    assert caplog.messages == lines
    train(model, optimizer, data(4), [1.0, bad] * 2)
    assert optimizer._engine.resting == 12
    assert caplog.messages[4:6] == [f"loss left out: step={s} losses=1 of=2" for s in (10, 12)]


@pytest.mark.parametrize(
    ("bad", "shown"), [(float("nan"), "nan"), (-float("inf"), "-inf"), (-0.5, "-0.5")]
)
def test_numbers_that_are_no_losses_are_refused(bad, shown):
    _, optimizer = build(**FLAT)
    optimizer.observe_loss(3.0)
    with pytest.raises(ValueError, match=rf"the loss is {shown}: it must be finite and at least 0"):
        optimizer.observe_loss(bad)
    shown = optimizer._handover.shown
    assert (shown.calls, shown.take(None)) == (1, 3.0)


def test_a_closed_optimizer_stays_closed():
    model, optimizer = build(**FLAT, back=0.0)
    train(model, optimizer, data(4), [1.0] * 4)
    optimizer.close()
    train(model, optimizer, data(6), [5.0] * 6)
    assert hooks(model) == 0
    optimizer.load_state_dict(build(**FLAT, back=0.0)[1].state_dict())
    assert hooks(model) == 0


def test_without_a_switch_losses_are_not_looked_at():
    model, optimizer = build()
    optimizer.observe_loss(torch.ones(3))
    train(model, optimizer, data(2))
    assert optimizer.state_dict()["preconditioner"]["hybrid"] is None


def test_wrong_losses_and_options_are_refused():
    _, optimizer = build(window=3)
    with pytest.raises(ValueError, match=r"the loss has shape \(3,\): pass a single number"):
        optimizer.observe_loss(torch.ones(3))
    with pytest.raises(TypeError, match="the loss must be a number or a tensor of one, got dict"):
        optimizer.observe_loss({"loss": 1.0})
    model = mlp()
    for wrong, got in ((HybridSwitch, "the class"), (True, "bool")):
        with pytest.raises(TypeError, match=f"hybrid must be a mkor.HybridSwitch.* got {got}"):
            mkor.MKOR(model, adam(model), hybrid=wrong)
    assert hooks(model) == 0


def test_the_switch_is_one_line_in_the_log(caplog):
    model, optimizer = build(**FLAT)
    with caplog.at_level(logging.INFO, logger="mkor"):
        train(model, optimizer, data(8), [1.0] * 8)
    assert caplog.messages == ["hybrid switch: phase=base optimizer alone step=4 after=4 loss=1"]


# HyLo reads norms of its own, once a period, and a decomposition its pivots.
@pytest.mark.parametrize("method", [name for name in METHODS if name != "hylo"])
def test_nothing_waits_for_the_device_between_windows(method):
    model, optimizer = build(method, sgd, window=4)
    reads = []
    for number, batch in enumerate(data(12)):
        loss = torch.ones(())

        def closure(batch=batch, loss=loss):
            optimizer.zero_grad()
            backward(model, batch)
            return loss

        try:
            with no_sync():
                optimizer.step(closure)
        except AssertionError:
            reads.append(number)
            break
    assert reads == [3]
