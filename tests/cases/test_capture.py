"""How layers are called: by keyword, repeatedly, without gradients, through `forward`."""

from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from cases.helpers import (
    after_steps,
    assert_moment,
    assert_same,
    build,
    every_method,
    factors,
    gradient_moment,
    gradient_sized,
    input_moment,
    mlp,
    observer,
    one_or_three,
    parameters,
    reasons,
    sgd_step,
    shown,
    take_step,
    train,
    updates,
)


class Edited(nn.Module):
    """A layer whose output is handed to a function."""

    def __init__(self, edit, bias):
        super().__init__()
        self.fc = nn.Linear(4, 3, bias=bias)
        self.edit = edit

    def forward(self, x):
        return self.edit(self.fc(x))


def increment_(y):
    y += 1
    return y


@every_method
@pytest.mark.parametrize("bias", [True, False])
def test_a01_inplace_activation(method, bias):
    def net(inplace):
        return nn.Sequential(
            nn.Conv2d(3, 4, 3, bias=bias),
            nn.ReLU(inplace=inplace),
            nn.Flatten(),
            nn.Linear(144, 2, bias=bias),
        )

    batches = [torch.randn(2, 3, 8, 8) for _ in range(2)]
    in_place = after_steps(method, lambda: net(inplace=True), batches)
    assert_same(in_place, after_steps(method, lambda: net(inplace=False), batches))


@every_method
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(
    ("in_place", "twin"),
    [(increment_, lambda y: y + 1), (F.relu_, F.relu)],
    ids=["increment", "relu"],
)
def test_a01_output_edited_in_place(method, bias, in_place, twin):
    batches = [torch.randn(6, 4) for _ in range(2)]
    edited = after_steps(method, lambda: Edited(in_place, bias), batches)
    assert_same(edited, after_steps(method, lambda: Edited(twin, bias), batches))


@one_or_three
def test_a01_gradient_behind_an_inplace_edit(vectors):
    model = Edited(F.relu_, bias=False)
    optimizer = observer(model, vectors)
    x = torch.randn(6, 4)
    g = (2 * F.relu(model.fc(x))).detach()  # of the sum of squares
    model(x).square().sum().backward()
    optimizer.step()
    assert_moment(shown(optimizer, "fc", "outputs"), gradient_moment(g.chunk(vectors), bias=False))


@every_method
def test_a03_evaluation_between_steps(method):
    def run(evaluate):
        torch.manual_seed(1)
        model = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        optimizer = build(method, model)
        for x in batches:
            train(model.train(), optimizer, [x])
            if evaluate:
                with torch.no_grad():
                    model.eval()(x)
        assert set(updates(optimizer).values()) == {2}
        assert "linear1" in updates(optimizer)
        return parameters(model) | factors(optimizer)

    batches = [torch.randn(3, 5, 8) for _ in range(2)]
    assert_same(run(evaluate=True), run(evaluate=False))


class Called(nn.Module):
    """Calls its layers by keyword or by position."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv1d(4, 4, 3, padding=1)
        self.mix = nn.MultiheadAttention(4, 2, batch_first=True)
        self.fc = nn.Linear(4, 3)

    def forward(self, x, keyword):
        q = (self.conv(input=x) if keyword else self.conv(x)).mT
        k, v = q.square(), q.tanh()
        if keyword:
            return self.fc(input=self.mix(value=v, key=k, query=q)[0])
        return self.fc(self.mix(q, k, v)[0])


@every_method
def test_a04_keyword_input(method):
    batches = [torch.randn(3, 4, 5) for _ in range(2)]
    by_keyword = after_steps(method, Called, batches, keyword=True)
    assert_same(by_keyword, after_steps(method, Called, batches, keyword=False))


class Bypassed(nn.Module):
    """Calls the `forward` of a layer, which runs no hook."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 3)
        self.head = nn.Linear(3, 2)

    def forward(self, x):
        return self.head(self.fc.forward(x).tanh())


@gradient_sized
def test_a05_direct_forward(method):
    model = Bypassed()
    optimizer = build(method, model)
    for number in range(2):
        before = parameters(model.fc)
        x = torch.randn(6, 4)
        told = pytest.warns(UserWarning, match="no statistics arrived for fc: ")
        with told if number == 0 else nullcontext():  # says it once: warnings are errors here
            taken = take_step(model, optimizer, lambda x=x: model(x).square().mean())
        assert_same(parameters(model.fc), sgd_step(before, taken.within("fc")), 1e-6)
    assert updates(optimizer) == {"fc": 0, "head": 2}


@every_method
@pytest.mark.parametrize("bias", [True, False])
def test_a06_data_without_gradient(method, bias):
    x = torch.randn(6, 4)
    plain = after_steps(method, lambda: mlp(4, 8, 2, bias=bias), [x])
    leaf = x.clone().requires_grad_()
    assert_same(plain, after_steps(method, lambda: mlp(4, 8, 2, bias=bias), [leaf]))


@one_or_three
@pytest.mark.parametrize("bias", [True, False])
def test_a06_first_layer_shows_both_sides(vectors, bias):
    model = mlp(4, 8, 2, bias=bias)
    optimizer = observer(model, vectors)
    x = torch.randn(6, 4)
    hidden = model[0](x).detach().requires_grad_()
    (g,) = torch.autograd.grad(model[1:](hidden).square().mean(), hidden)
    model(x).square().mean().backward()
    optimizer.step()
    assert_moment(shown(optimizer, "0", "inputs"), input_moment(x.chunk(vectors), bias))
    assert_moment(shown(optimizer, "0", "outputs"), gradient_moment(g.chunk(vectors), bias))


@pytest.mark.parametrize(("vectors", "samples"), [(1, 2), (3, 3), (3, 6)])
@pytest.mark.parametrize("bias", [True, False])
def test_a07_two_calls_of_different_sizes(vectors, samples, bias):
    emb = nn.Linear(4, 4, bias=bias)
    optimizer = observer(emb, vectors)
    x, z = torch.randn(samples, 4), torch.randn(samples, 5, 4)
    g_z = (2 * emb(z)).detach()  # of the sum of squares
    (emb(x).sum() + emb(z).square().sum()).backward()
    optimizer.step()

    def blocks(first, second):
        pairs = zip(first.chunk(vectors), second.chunk(vectors), strict=True)
        return [torch.cat([a, b.flatten(0, 1)]) for a, b in pairs]

    rows, grads = blocks(x, z), blocks(torch.ones(samples, 4), g_z)
    assert sum(len(block) for block in rows) == 6 * samples
    assert_moment(shown(optimizer, "Linear", "inputs"), input_moment(rows, bias))
    assert_moment(shown(optimizer, "Linear", "outputs"), gradient_moment(grads, bias))
    assert updates(optimizer) == {"Linear": 1}


@one_or_three
@pytest.mark.parametrize("bias", [True, False])
def test_a08_unrolled_cell(vectors, bias):
    class Cell(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(7, 4, bias=bias)
            self.seen = []
            self.made = []

        def forward(self, x):  # [T, n, 3]
            h = x.new_zeros(x.shape[1], 4)
            for x_t in x:
                self.seen.append(torch.cat([x_t, h], dim=-1))
                self.made.append(self.fc(self.seen[-1]))
                h = self.made[-1].tanh()
            return h

    model = Cell()
    optimizer = observer(model, vectors)
    loss = model(torch.randn(5, 6, 3)).square().mean()
    grads = torch.autograd.grad(loss, model.made, retain_graph=True)
    loss.backward()
    optimizer.step()

    def blocks(calls):
        return [torch.cat(parts) for parts in zip(*(c.chunk(vectors) for c in calls), strict=True)]

    assert updates(optimizer) == {"fc": 1}
    assert_moment(shown(optimizer, "fc", "inputs"), input_moment(blocks(model.seen), bias))
    assert_moment(shown(optimizer, "fc", "outputs"), gradient_moment(blocks(grads), bias))


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(3, 4)
        self.head = nn.Linear(4, 2)

    def forward(self, x):
        return self.head(self.lstm(x)[0])


@every_method
def test_a08_lstm_falls_back(method):
    model = Recurrent()
    optimizer = build(method, model)
    before = parameters(model.lstm)
    x = torch.randn(5, 6, 3)
    taken = take_step(model, optimizer, lambda: model(x).square().mean())
    assert_same(parameters(model.lstm), sgd_step(before, taken.within("lstm")), 1e-6)
    assert updates(optimizer) == {"head": 1}
    assert "LSTM" in reasons(optimizer)["lstm"]
