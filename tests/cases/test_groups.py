"""Parameter groups, weight decay, checkpoints of other models, and a change of dtype."""

import io

import pytest
import torch
from torch import nn

from cases.helpers import (
    LR,
    TwoHeads,
    assert_same,
    build,
    every_method,
    factors,
    mlp,
    parameters,
    sgd,
    take_step,
    train,
    updates,
)


def saved(*things):
    """State dicts after a trip through a file, read back with `weights_only`."""
    buffer = io.BytesIO()
    torch.save([thing.state_dict() for thing in things], buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


@every_method
@pytest.mark.parametrize("seen", ["ab", "aa"], ids=["both", "only-a"])
def test_a31_first_step_after_resume_skips_a_head(method, seen):
    def make():
        model = TwoHeads()
        base = sgd(model, momentum=0.9)
        return model, build(method, model, base, warmup_steps=0, factor_update_steps=3)

    def go_on(model, optimizer):
        for head, batch in zip("ab", batches[2:], strict=True):
            train(model, optimizer, [batch], head=head)
        return parameters(model) | factors(optimizer)

    batches = [torch.randn(6, 4) for _ in range(4)]
    model, optimizer = make()
    for head, batch in zip(seen, batches, strict=False):
        train(model, optimizer, [batch], head=head)
    model_state, optimizer_state = saved(model, optimizer)

    fresh_model, fresh = make()
    fresh_model.load_state_dict(model_state)
    fresh.load_state_dict(optimizer_state)
    assert_same(go_on(fresh_model, fresh), go_on(model, optimizer))
    assert updates(fresh) == updates(optimizer)


class Growing(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1 = nn.Linear(4, 4)

    def forward(self, x):
        h = self.fc1(x).tanh()
        return self.fc2(h) if hasattr(self, "fc2") else h


def grow(model, optimizer):
    model.fc2 = nn.Linear(4, 3)
    optimizer.add_param_group({"params": model.fc2.parameters(), "lr": 0.01})


@every_method
def test_a33_layer_added_later(method):
    model = Growing()
    optimizer = build(method, model, sgd(model, momentum=0.9))
    train(model, optimizer, [torch.randn(6, 4)])
    known = factors(optimizer)
    grow(model, optimizer)
    assert_same(factors(optimizer), known)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    assert schedule.get_last_lr() == [LR, 0.01]

    before = parameters(model)
    train(model, optimizer, [torch.randn(6, 4)])
    for name, p in model.fc2.named_parameters():  # momentum starts with the gradient itself
        torch.testing.assert_close(p.detach(), before[f"fc2.{name}"] - 0.01 * p.grad)
    assert updates(optimizer) == {"fc1": 2, "fc2": 1}
    schedule.step()
    assert [group["lr"] for group in optimizer.base.param_groups] == [LR / 2, 0.005]

    model_state, optimizer_state = saved(model, optimizer)
    fresh_model = Growing()
    fresh = build(method, fresh_model, sgd(fresh_model, momentum=0.9))
    grow(fresh_model, fresh)
    fresh_model.load_state_dict(model_state)
    fresh.load_state_dict(optimizer_state)
    batches = [torch.randn(6, 4) for _ in range(2)]
    for trained, own in ((model, optimizer), (fresh_model, fresh)):
        train(trained, own, batches)
    assert_same(parameters(fresh_model) | factors(fresh), parameters(model) | factors(optimizer))


@every_method
def test_a33_biases_added_later(method):
    """A bias joins the matrix of its layer once the base has it."""
    model = mlp(4, 8, 2)
    weights = [p for p in model.parameters() if p.dim() > 1]
    optimizer = build(method, model, torch.optim.SGD(weights, lr=LR))
    train(model, optimizer, [torch.randn(6, 4)])
    optimizer.add_param_group({"params": [p for p in model.parameters() if p.dim() == 1]})
    before = parameters(model)
    losses = train(model, optimizer, [torch.randn(6, 4)] * 3)
    assert losses[2] < losses[0]
    assert not any(torch.equal(value, before[name]) for name, value in parameters(model).items())
    assert all(count >= 3 for count in updates(optimizer).values())


@every_method
@pytest.mark.parametrize(
    ("make", "complaints"),
    [
        (lambda: mlp(4, 8, 3, 2), ["it lacks layer '4'"]),
        (lambda: mlp(4, 8), ["it has layer '2', this model does not"]),
        (lambda: mlp(4, 6, 3), ["layer '0' is ", "layer '2' is "]),
        (
            lambda: nn.Sequential(nn.Tanh(), *mlp(4, 8, 3)),
            ["it lacks layer '1'", "it has layer '0'"],
        ),
    ],
    ids=["more", "fewer", "resized", "renamed"],
)
def test_a34_checkpoint_of_another_model(method, make, complaints):
    model, other = mlp(4, 8, 3), make()
    optimizer = build(method, model, sgd(model, momentum=0.9))
    train(model, optimizer, [torch.randn(6, 4)])
    state = optimizer.state_dict()

    fresh = build(method, other, sgd(other, momentum=0.9))
    with pytest.raises(ValueError, match="strict=False") as error:
        fresh.load_state_dict(state)
    assert all(complaint in str(error.value) for complaint in complaints)
    assert not factors(fresh)
    assert not fresh.state

    fresh.load_state_dict(state, strict=False)
    shapes = {info.name: info.shape for info in optimizer.layers()}
    same = {info.name for info in fresh.layers() if shapes.get(info.name) == info.shape}
    kept = {k: v for k, v in factors(optimizer).items() if k.split(".")[0] in same}
    assert factors(fresh).keys() == kept.keys()
    if same:
        assert_same(factors(fresh), kept)
    known = updates(fresh)
    train(other, fresh, [torch.randn(6, 4)])
    assert updates(fresh) == {name: count + 1 for name, count in known.items()}


def test_a34_embedding_of_another_size():
    def make(words):
        model = nn.Sequential(nn.Embedding(words, 4), nn.Linear(4, 2))
        return model, build("exact", model, sgd(model, momentum=0.9))

    model, optimizer = make(11)
    x = torch.randint(9, (6,))
    train(model, optimizer, [x])
    other, fresh = make(9)
    with pytest.raises(ValueError, match=r"parameter '0.weight' is \[11, 4\] there and \[9, 4\]"):
        fresh.load_state_dict(optimizer.state_dict())
    fresh.load_state_dict(optimizer.state_dict(), strict=False)
    assert_same(factors(fresh), factors(optimizer))
    assert other[0].weight not in fresh.state
    assert other[1].weight in fresh.state
    train(other, fresh, [x])


def test_a34_momentum_of_the_layers_that_match():
    model, other = mlp(4, 8, 3), mlp(4, 8, 3, 2)
    optimizer = build("exact", model, sgd(model, momentum=0.9))
    train(model, optimizer, [torch.randn(6, 4)])
    fresh = build("exact", other, sgd(other, momentum=0.9))
    fresh.load_state_dict(optimizer.state_dict(), strict=False)
    for name, p in other.named_parameters():
        if name.startswith("4."):
            assert p not in fresh.state
        else:
            buffer = optimizer.state[model.get_parameter(name)]["momentum_buffer"]
            assert torch.equal(fresh.state[p]["momentum_buffer"], buffer)


@every_method
def test_a35_groups_stay_as_they_are(method):
    model = mlp(4, 8, 2)
    groups = [
        {"params": list(model[0].parameters()), "lr": 1e-3, "weight_decay": 0.1},
        {"params": list(model[2].parameters()), "lr": 1e-4, "weight_decay": 0.0},
    ]
    base = torch.optim.SGD(groups)
    optimizer = build(method, model, base)
    assert optimizer.param_groups is base.param_groups
    settings = [(group["lr"], group["weight_decay"]) for group in optimizer.param_groups]
    assert settings == [(1e-3, 0.1), (1e-4, 0.0)]
    for _ in range(2):
        before = parameters(model)
        train(model, optimizer, [torch.randn(6, 4)])
        for name, p in model.named_parameters():
            lr, decay = settings[0] if name.startswith("0.") else settings[1]
            expected = before[name] - lr * (p.grad + decay * before[name])
            torch.testing.assert_close(p.detach(), expected, rtol=1e-6, atol=1e-8)
            assert p.grad.abs().max() > 0
    optimizer.param_groups[1]["lr"] = 0.0
    before = parameters(model[2])
    train(model, optimizer, [torch.randn(6, 4)])
    assert_same(parameters(model[2]), before)


BASES = {
    "SGD": lambda params: torch.optim.SGD(params, lr=1.0, weight_decay=0.1),
    "SGD-momentum": lambda params: torch.optim.SGD(params, lr=1.0, momentum=0.9, weight_decay=0.1),
    "Adam": lambda params: torch.optim.Adam(params, lr=1.0, weight_decay=0.1),
    "AdamW": lambda params: torch.optim.AdamW(params, lr=1.0, weight_decay=0.1),
}


@every_method
@pytest.mark.parametrize("base", BASES)
def test_a36_weight_decay_is_the_base_optimizers(method, base):
    def run(wrap):
        model = nn.Linear(4, 3)
        for p in model.parameters():
            nn.init.ones_(p)
        optimizer = wrap(model, BASES[base](model.parameters()))
        taken = take_step(model, optimizer, lambda: model(x).sum() * 0)
        assert not any(grad.any() for grad in taken.grads.values())
        return parameters(model)

    x = torch.randn(6, 4)
    wrapped = run(lambda model, inner: build(method, model, inner))
    assert_same(wrapped, run(lambda model, inner: inner))
    if base in ("SGD", "AdamW"):
        torch.testing.assert_close(wrapped["weight"], torch.full((3, 4), 0.9))


@every_method
def test_a36_weight_decay_does_not_pass_through_the_preconditioner(method):
    def run(decay):
        torch.manual_seed(1)
        model = mlp(4, 8, 2)
        before = parameters(model)
        train(model, build(method, model, sgd(model, weight_decay=decay)), [x])
        return before, parameters(model)

    x = torch.randn(6, 4)
    (before, decayed), (_, plain) = run(0.1), run(0.0)
    expected = {name: plain[name] - LR * 0.1 * before[name] for name in plain}
    assert_same(decayed, expected, 1e-6)


@every_method
def test_a39_dtype_changed_before_the_first_step(method):
    def run(late):
        torch.manual_seed(1)
        model = mlp(4, 8, 2)
        if not late:
            model.double()
        optimizer = build(method, model)
        model.double()
        train(model, optimizer, batches)
        assert updates(optimizer) == {"0": 2, "2": 2}
        return parameters(model) | factors(optimizer)

    batches = [torch.randn(6, 4, dtype=torch.float64) for _ in range(2)]
    late = run(late=True)
    assert_same(late, run(late=False))
    assert all(value.dtype == torch.float64 for value in late.values() if value.is_floating_point())


@every_method
def test_a39_dtype_changed_between_steps(method):
    model = mlp(4, 8, 2)
    optimizer = build(method, model)
    train(model, optimizer, [torch.randn(6, 4) for _ in range(2)])
    state = optimizer.state_dict()
    twin = mlp(4, 8, 2).double()
    model.double()
    twin.load_state_dict(model.state_dict())
    other = build(method, twin)
    other.load_state_dict(state)
    batches = [torch.randn(6, 4, dtype=torch.float64) for _ in range(2)]
    for trained, own in ((model, optimizer), (twin, other)):
        train(trained, own, batches)
    assert_same(parameters(model) | factors(optimizer), parameters(twin) | factors(other))
    assert all(
        v.dtype == torch.float64 for v in factors(optimizer).values() if v.is_floating_point()
    )
    assert updates(optimizer) == {"0": 4, "2": 4}
