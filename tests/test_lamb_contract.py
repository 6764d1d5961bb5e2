"""LAMB keeps the contract of `torch.optim`: state, resume, groups, schedules, scaling."""

import copy
import io
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import lr_scheduler as schedulers

import mkor
from small_runs import backward, data, mlp, same, train


def groups(model):
    """Weights with decay, biases without."""
    decayed = [p for p in model.parameters() if p.ndim > 1]
    return [
        {"params": decayed},
        {"params": [p for p in model.parameters() if p.ndim == 1], "weight_decay": 0.0},
    ]


def build(model, **options):
    return mkor.LAMB(groups(model), **{"lr": 0.02, **options})


def through_a_file(thing):
    buffer = io.BytesIO()
    torch.save(thing, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


def half_data(steps, dtype):
    return [(x.to(dtype), y.to(dtype)) for x, y in data(steps)]


def test_it_trains():
    model = mlp()
    optimizer = build(model)
    batch = data(1)[0]
    losses = []
    for _ in range(200):
        losses.append(backward(model, batch).item())
        optimizer.step()
        optimizer.zero_grad()
    assert losses[-1] < 0.1 * losses[0]
    assert type(optimizer) is mkor.LAMB and "LAMB (" in repr(optimizer)


def test_the_state_is_laid_out_as_in_torch():
    model = mlp()
    optimizer = build(model)
    assert not optimizer.state
    train(model, optimizer, data(2))
    adam = torch.optim.AdamW(model.parameters())
    backward(model, data(1)[0])
    adam.step()
    for p in model.parameters():
        own, theirs = optimizer.state[p], adam.state[p]
        assert list(own) == list(theirs) == ["step", "exp_avg", "exp_avg_sq"]
        for key in own:
            assert (own[key].shape, own[key].dtype) == (theirs[key].shape, theirs[key].dtype)
        assert own["step"].item() == 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_resume_gives_the_same_bits(dtype):
    batches = half_data(8, dtype)
    straight = mlp().to(dtype)
    train(straight, build(straight), batches)
    stopped = mlp().to(dtype)
    optimizer = build(stopped)
    train(stopped, optimizer, batches[:4])
    saved = through_a_file({"model": stopped.state_dict(), "optimizer": optimizer.state_dict()})
    resumed = mlp().to(dtype)
    resumed.load_state_dict(saved["model"])
    again = build(resumed, lr=1.0, betas=(0.5, 0.5), max_grad_norm=None)
    again.load_state_dict(saved["optimizer"])
    assert [g["lr"] for g in again.param_groups] == [0.02, 0.02]
    train(resumed, again, batches[4:])
    assert same(straight, resumed)


def test_a_loaded_state_is_no_part_of_the_checkpoint():
    model = mlp()
    optimizer = build(model)
    train(model, optimizer, data(1))
    saved = optimizer.state_dict()
    kept = copy.deepcopy(saved["state"])
    twin = build(mlp())
    twin.load_state_dict(saved)
    for p in twin.param_groups[0]["params"]:
        p.grad = torch.ones_like(p)
    twin.step()
    for key, state in kept.items():
        assert all(torch.equal(saved["state"][key][name], state[name]) for name in state)


def test_hooks_on_loading_see_and_change_what_is_loaded():
    model = mlp().bfloat16()
    optimizer = build(model)
    train(model, optimizer, half_data(1, torch.bfloat16))
    saved = optimizer.state_dict()
    twin = build(mlp().bfloat16())
    dtypes = []

    def double(_, loaded):
        state = {
            key: {**s, "exp_avg": 2 * s["exp_avg"]} for key, s in copy.copy(loaded["state"]).items()
        }
        return {**loaded, "state": state}

    def look(optimizer):
        dtypes.extend(s["exp_avg"].dtype for s in optimizer.state.values())

    twin.register_load_state_dict_pre_hook(double)
    twin.register_load_state_dict_post_hook(look)
    twin.load_state_dict(saved)
    assert dtypes == [torch.float32] * 3
    own = [p for group in optimizer.param_groups for p in group["params"]]
    loaded = [p for group in twin.param_groups for p in group["params"]]
    for p, q in zip(own, loaded, strict=True):
        assert torch.equal(2 * optimizer.state[p]["exp_avg"], twin.state[q]["exp_avg"])
    assert len(twin._optimizer_load_state_dict_pre_hooks) == 1
    assert len(twin._optimizer_load_state_dict_post_hooks) == 1


def test_a_checkpoint_that_does_not_fit_changes_nothing():
    model = mlp()
    optimizer = build(model)
    train(model, optimizer, data(1))
    before = copy.deepcopy(optimizer.state_dict())
    with pytest.raises(ValueError, match="different number of parameter groups"):
        optimizer.load_state_dict(mkor.LAMB(model.parameters()).state_dict())
    assert str(optimizer.state_dict()) == str(before)
    assert not optimizer._optimizer_load_state_dict_pre_hooks
    assert not optimizer._optimizer_load_state_dict_post_hooks


def test_a_checkpoint_of_adamw_goes_on_as_lamb():
    model = mlp()
    adam = torch.optim.AdamW(model.parameters(), lr=0.01)
    train(model, adam, data(2))
    optimizer = mkor.LAMB(model.parameters(), max_grad_norm=0.25, trust_ratio="all")
    optimizer.load_state_dict(adam.state_dict())
    group = optimizer.param_groups[0]
    assert (group["lr"], group["max_grad_norm"], group["trust_ratio"]) == (0.01, 0.25, "all")
    train(model, optimizer, data(1))
    assert {s["step"].item() for s in optimizer.state.values()} == {3}


@pytest.mark.parametrize("clone", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_a_copy_with_its_model_goes_on_alike(clone):
    model = mlp()
    optimizer = build(model, lr=torch.tensor(0.02))
    train(model, optimizer, data(2))
    twin, copied = clone((model, optimizer))
    for m, o in ((model, optimizer), (twin, copied)):
        train(m, o, data(2))
    assert same(model, twin)
    assert copied.param_groups[0]["params"][0] is twin[0].weight


def test_groups_may_be_added_late():
    model = mlp()
    optimizer = mkor.LAMB(model[0].parameters(), lr=0.02)
    train(model, optimizer, data(2))
    optimizer.add_param_group({"params": model[2].parameters(), "lr": 0.5, "trust_ratio": "all"})
    train(model, optimizer, data(1))
    assert [s["step"].item() for s in optimizer.state.values()] == [3, 3, 1]
    assert optimizer.param_groups[1]["max_grad_norm"] == 1.0
    with pytest.raises(TypeError, match="param_group must be a dict"):
        optimizer.add_param_group([nn.Parameter(torch.ones(1))])
    with pytest.raises(ValueError, match="empty parameter list"):
        mkor.LAMB([])


def test_named_parameters_are_taken():
    model = mlp()
    optimizer = mkor.LAMB(model.named_parameters(), lr=0.02)
    train(model, optimizer, data(1))
    names = optimizer.state_dict()["param_groups"][0]["param_names"]
    assert names == [name for name, _ in model.named_parameters()]


def test_a_closure_is_evaluated_first_with_gradients():
    model, twin = mlp(), mlp()
    optimizer, expected = build(model), build(twin)
    batch = data(1)[0]

    def closure():
        assert torch.is_grad_enabled()
        optimizer.zero_grad()
        return backward(model, batch)

    with torch.no_grad():
        loss = optimizer.step(closure)
    train(twin, expected, [batch])
    assert loss.item() == F.mse_loss(mlp()(batch[0]), batch[1]).item()
    assert same(model, twin)
    assert expected.step() is None


def test_a_parameter_without_gradient_is_skipped():
    model = mlp()
    model[2].weight.requires_grad_(False)
    before = model[2].weight.clone()
    optimizer = build(model)
    train(model, optimizer, data(2))
    assert torch.equal(model[2].weight, before)
    assert model[2].weight not in optimizer.state


@pytest.mark.parametrize("shape", [(), (1,)])
@pytest.mark.parametrize("options", [{}, {"weight_decay_mode": "decoupled"}])
def test_a_tensor_as_learning_rate(shape, options):
    model, twin = mlp(), mlp()
    optimizer = build(model, lr=torch.full(shape, 0.02), **options)
    expected = build(twin, **options)
    train(model, optimizer, data(2))
    train(twin, expected, data(2))
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p, q)
    optimizer.param_groups[0]["lr"].fill_(0.0)  # one tensor for both groups, as in torch
    before = copy.deepcopy(model)
    train(model, optimizer, data(1))
    assert same(model, before)


SCHEDULERS = {
    "lambda": lambda o: schedulers.LambdaLR(o, lambda step: 0.9**step),
    "multiplicative": lambda o: schedulers.MultiplicativeLR(o, lambda _: 0.9),
    "step": lambda o: schedulers.StepLR(o, 2),
    "multistep": lambda o: schedulers.MultiStepLR(o, [1, 3]),
    "constant": schedulers.ConstantLR,
    "linear": schedulers.LinearLR,
    "exponential": lambda o: schedulers.ExponentialLR(o, 0.9),
    "polynomial": schedulers.PolynomialLR,
    "cosine": lambda o: schedulers.CosineAnnealingLR(o, 5),
    "restarts": lambda o: schedulers.CosineAnnealingWarmRestarts(o, 3),
    "plateau": lambda o: schedulers.ReduceLROnPlateau(o, patience=0, threshold=10.0),
    "cyclic": lambda o: schedulers.CyclicLR(o, 0.001, 0.1, step_size_up=2),
    "one-cycle": lambda o: schedulers.OneCycleLR(o, 0.1, total_steps=8),
    "sequential": lambda o: schedulers.SequentialLR(
        o, [schedulers.ConstantLR(o), schedulers.ExponentialLR(o, 0.5)], [2]
    ),
    "chained": lambda o: schedulers.ChainedScheduler(
        [schedulers.ConstantLR(o), schedulers.ExponentialLR(o, 0.5)]
    ),
}


@pytest.mark.parametrize("name", SCHEDULERS)
def test_schedulers_drive_it_as_they_drive_adamw(name):
    model, twin = mlp(), mlp()
    optimizer, adam = build(model), torch.optim.AdamW(groups(twin), lr=0.02)
    pairs = [(m, o, SCHEDULERS[name](o)) for m, o in ((model, optimizer), (twin, adam))]
    seen = []
    for batch in data(5):
        for m, o, scheduler in pairs:
            train(m, o, [batch])
            scheduler.step(*([1.0] if name == "plateau" else []))
        seen.append([[(g["lr"], g["betas"]) for g in o.param_groups] for _, o, _ in pairs])
    assert all(own == theirs for own, theirs in seen)
    assert len({str(own) for own, _ in seen}) > 1


def test_a_schedule_changes_the_step():
    p = nn.Parameter(torch.ones(4))
    optimizer = mkor.LAMB([p], lr=0.1)
    scheduler = schedulers.LambdaLR(optimizer, lambda step: 1.0 if step == 0 else 0.0)
    p.grad = torch.ones(4)
    optimizer.step()
    scheduler.step()
    before = p.detach().clone()
    optimizer.step()
    assert torch.equal(p, before)


def test_a_gradient_scaler_skips_overflows_and_changes_nothing_else():
    model, twin = mlp(), mlp()
    optimizer, expected = build(model), build(twin)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for number, batch in enumerate(data(3)):
        scaler.scale(F.mse_loss(model(batch[0]), batch[1])).backward()
        if number == 1:
            model[0].weight.grad[0, 0] = torch.inf
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        if number != 1:
            train(twin, expected, [batch])
    assert same(model, twin)
    assert {s["step"].item() for s in optimizer.state.values()} == {2}


def test_step_hooks_of_torch_run():
    model = mlp()
    optimizer = build(model)
    calls = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    train(model, optimizer, data(1))
    assert calls == ["before", "after"]


def test_training_under_mkor_resumes_to_the_same_bits():
    def pair(model):
        return mkor.MKOR(model, build(model), factor_update_steps=2)

    straight, stopped, resumed = mlp(), mlp(), mlp()
    train(straight, pair(straight), data(6))
    optimizer = pair(stopped)
    train(stopped, optimizer, data(6)[:3])
    saved = through_a_file([stopped.state_dict(), optimizer.state_dict()])
    resumed.load_state_dict(saved[0])
    again = pair(resumed)
    again.load_state_dict(saved[1])
    train(resumed, again, data(6)[3:])
    assert same(straight, resumed)
    assert again.state is again.base.state


def test_the_state_dicts_of_torch_distributed_hold_it():
    from torch.distributed.checkpoint.state_dict import (
        get_optimizer_state_dict,
        set_optimizer_state_dict,
    )

    model, twin = mlp(), mlp()
    optimizer, other = build(model), build(twin, lr=1.0)
    train(model, optimizer, data(2))
    twin.load_state_dict(model.state_dict())
    set_optimizer_state_dict(twin, other, get_optimizer_state_dict(model, optimizer))
    train(model, optimizer, data(2))
    train(twin, other, data(2))
    assert same(model, twin)
