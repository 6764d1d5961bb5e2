"""set_mask: padding leaves no trace in what an optimizer learns, for every method."""

import math
import re

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import mkor
from cases.helpers import METHODS, assert_same, factors, parameters, updates
from test_no_sync import no_sync

CASES = {
    **METHODS,
    "kfac-reduce": (mkor.KFAC, {"weight_sharing": "reduce"}),
}
every_method = pytest.mark.parametrize("method", CASES)
keeps_rows = ("sngd", "hylo-kis", "hylo-kid")

WIDTH, LENGTH, MORE = 4, 4, 4


class Tagger(nn.Module):
    """Two layers on tokens, then a pooled head; some layers may be recomputed in backward."""

    def __init__(self, reentrant=None, bias=True):
        super().__init__()
        self.reentrant = reentrant
        self.first = nn.Linear(WIDTH, 6, bias=bias)
        self.second = nn.Linear(6, 5, bias=bias)
        self.head = nn.Linear(5, 3, bias=bias)

    def block(self, x):
        return self.second(self.first(x).tanh()).tanh()

    def forward(self, x, mask=None):
        if self.reentrant is None:
            h = self.block(x)
        else:
            h = checkpoint(self.block, x, use_reentrant=self.reentrant)
        if mask is None:
            return self.head(h.mean(dim=1))
        return self.head((h * mask[..., None]).sum(dim=1) / mask.sum(dim=1, keepdim=True))


def build(method, model, **more):
    cls, options = CASES[method]
    base = torch.optim.SGD(model.parameters(), lr=0.05)
    return cls(model, base, **{"warmup_steps": 4, **options, **more})


def batches(count=3, samples=6):
    return [torch.randn(samples, LENGTH, WIDTH, dtype=torch.float64) for _ in range(count)]


def padded(x):
    """Large numbers after each sample, and where the true ones are."""
    noise = 30 * torch.randn(x.shape[0], MORE, WIDTH, dtype=x.dtype)
    mask = torch.zeros(x.shape[0], LENGTH + MORE, dtype=torch.long)
    mask[:, :LENGTH] = 1
    return torch.cat([x, noise], dim=1).requires_grad_(), mask


def step(model, optimizer, parts, told=True):
    """One step on micro-batches (x, mask)."""

    def closure():
        optimizer.zero_grad()
        loss = 0.0
        for x, mask in parts:
            if told:
                optimizer.set_mask(mask)
            part = model(x, mask).square().mean() / len(parts)
            part.backward()
            loss = loss + part.detach()
        return loss

    return optimizer.step(closure)


def run(method, data, told=True, wrap=lambda model: model, make=Tagger, **options):
    """Parameters and factors after a step a batch; each batch is a list of micro-batches."""
    torch.manual_seed(1)
    model = make().double()
    optimizer = build(method, model, **options)
    for parts in data:
        step(wrap(model), optimizer, parts, told)
    assert set(updates(optimizer).values()) == {len(data)}
    return parameters(model) | comparable(method, factors(optimizer))


def comparable(method, state):
    """What doesn't depend on the number of rows kept, nor on the signs of eigenvectors."""
    if method in keeps_rows:  # padded by rows of zeros
        return {key: tensor for key, tensor in state.items() if key.endswith(("damping", "events"))}
    if method == "lowrank-sketch":
        sides = [key for key in state if key.endswith(("inputs", "outputs"))]
        return state | {key: state[key].mT @ state[key] for key in sides}
    return state


@every_method
@pytest.mark.parametrize("bias", [True, False])
def test_a_padded_batch_teaches_what_the_batch_teaches(method, bias):
    """Where rows are picked, the same number of twice as many."""

    def make():
        return Tagger(bias=bias)

    data = batches()
    full = [[padded(x)] for x in data]
    picks = {"rank": CASES[method][1]["rank"] / 2} if method.startswith("hylo") else {}
    skip = {"skip": ["head"]} if picks else {}  # its rows are not padded
    plain = run(method, [[(x, None)] for x in data], make=make, **skip)
    masked = run(method, full, make=make, **skip, **picks)
    assert_same(masked, plain, 1e-8)
    if not picks:  # rows of zero gradient are hardly ever picked
        blind = run(method, full, told=False, make=make)
        assert not all(torch.allclose(blind[key], plain[key], rtol=1e-3) for key in plain)


@every_method
@pytest.mark.parametrize("reentrant", [True, False])
def test_masks_and_activation_checkpointing(method, reentrant):
    data = [[padded(x)] for x in batches()]
    recomputed = run(method, data, make=lambda: Tagger(reentrant))
    assert_same(recomputed, run(method, data), 1e-8)


@pytest.mark.parametrize("method", ["exact", "kfac-eigen", "eva", "sngd"])
def test_micro_batches_of_unequal_padding(method):
    """Each with its own mask; two of them teach what all their rows in one batch do."""
    data = batches(samples=8)
    whole = [[(x, None)] for x in data]
    halves = [[padded(x[:4]), (x[4:], torch.ones(4, LENGTH))] for x in data]
    halves = [[(x, mask.bool()) for x, mask in parts] for parts in halves]
    assert_same(run(method, halves), run(method, whole), 1e-8)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
@every_method
def test_masks_and_compile(method):
    torch._dynamo.reset()
    data = [[padded(x)] for x in batches()]
    fast = run(method, data, wrap=lambda model: torch.compile(model, backend="eager"))
    assert_same(fast, run(method, data), 1e-8)
    torch._dynamo.reset()


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_masks_break_no_graph():
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model = Tagger().double()
    optimizer = build("exact", model, factor_update_steps=2, warmup_steps=0)
    fast = torch.compile(model, backend="eager", fullgraph=True)
    for x in batches(6):
        step(fast, optimizer, [padded(x), padded(x)])
    counters = torch._dynamo.utils.counters
    assert counters["stats"]["unique_graphs"] == 2 and not counters["graph_break"]
    torch._dynamo.reset()


@every_method
def test_a_mask_is_never_read_back(method):
    model = Tagger().double()
    optimizer = build(method, model)
    data = [padded(x) for x in batches()]
    step(model, optimizer, data)
    with no_sync():
        step(model, optimizer, data)


def test_a_mask_ends_with_its_step():
    data = batches()
    plain = run("exact", [[(x, None)] for x in data])
    torch.manual_seed(1)
    model = Tagger().double()
    optimizer = build("exact", model)
    for number, x in enumerate(data):
        if number == 1:
            optimizer.set_mask(torch.ones(6, LENGTH, dtype=torch.bool))
        step(model, optimizer, [(x, None)], told=False)
    assert_same(parameters(model) | factors(optimizer), plain, 1e-8)


@pytest.mark.parametrize("cleared", [1, 2])
def test_a_mask_ends_with_a_batch_that_is_dropped(cleared):
    """As after a step that a loss scaler skips."""
    data = batches(2)
    plain = run("exact", [[(data[1], None)]])
    torch.manual_seed(1)
    model = Tagger().double()
    optimizer = build("exact", model)
    optimizer.set_mask(torch.arange(LENGTH).expand(6, -1) < 2)
    model(data[0]).square().mean().backward()
    for _ in range(cleared):
        optimizer.zero_grad()
    step(model, optimizer, [(data[1], None)], told=False)
    assert_same(parameters(model) | factors(optimizer), plain, 0)


@pytest.mark.parametrize("reentrant", [None, True, False])
def test_a_mask_outlives_gradients_that_are_cleared_before_its_backward_pass(reentrant):
    x, mask = padded(batches(1)[0])

    def one(late):
        torch.manual_seed(1)
        model = Tagger(reentrant).double()
        optimizer = build("exact", model)
        optimizer.set_mask(mask)
        optimizer.zero_grad()
        loss = model(x, mask).square().mean()
        if late:
            optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return parameters(model) | factors(optimizer)

    assert_same(one(late=True), one(late=False), 0)


def test_the_second_pass_of_a_batch_has_its_mask():
    """Though the closure clears the gradients between forward and backward."""
    x, mask = padded(batches(1)[0])

    def one(inside):
        torch.manual_seed(1)
        model = Tagger().double()
        optimizer = build("kbfgs", model)
        optimizer.set_mask(mask)

        def closure():
            if inside:
                optimizer.set_mask(mask)
            loss = model(x, mask).square().mean()
            optimizer.zero_grad()
            loss.backward()
            return loss

        optimizer.step(closure)
        return parameters(model) | factors(optimizer)

    assert_same(one(inside=False), one(inside=True), 0)


@every_method
def test_a_batch_of_padding_alone_teaches_nothing(method):
    torch.manual_seed(1)
    model = Tagger().double()
    optimizer = build(method, model)
    for x in batches(2):
        step(model, optimizer, [(x, None)])
    before = factors(optimizer)

    def closure():
        optimizer.zero_grad()
        loss = model(batches(1)[0]).square().mean() * 0
        loss.backward()
        return loss

    optimizer.set_mask(torch.zeros(6, dtype=torch.bool))
    optimizer.step(closure)
    assert_same(factors(optimizer), before, 0)
    assert set(updates(optimizer).values()) == {3}


def test_a_mask_of_samples_goes_for_every_layer():
    x = torch.randn(6, LENGTH, WIDTH, dtype=torch.float64)
    keep = torch.tensor([True, False, True, True, False, True])

    def one(x, mask, weights):
        torch.manual_seed(1)
        model = Tagger().double()
        optimizer = build("kfac-eigen", model)
        optimizer.set_mask(mask)
        (model(x).square().mean(dim=1) * weights).mean().backward()
        optimizer.step()
        return factors(optimizer)

    weights = keep.float() * 6 / keep.sum()
    shown = one(x, keep, weights)
    inputs = one(x[keep], None, torch.ones(4))
    covariances = [key for key in inputs if key.endswith(("inputs", "input"))]
    assert_same({k: shown[k] for k in covariances}, {k: inputs[k] for k in covariances}, 1e-8)


def mask_error(mask):
    model = Tagger().double()
    optimizer = build("exact", model)
    before = parameters(model)
    optimizer.set_mask(mask)
    model(torch.randn(6, LENGTH, WIDTH, dtype=torch.float64)).square().mean().backward()
    with pytest.raises(ValueError, match="fits no layer") as error:
        optimizer.step()
    assert set(updates(optimizer).values()) == {0}
    assert_same(parameters(model), before)
    return model, optimizer, str(error.value)


def test_a_mask_that_fits_no_layer():
    model, optimizer, text = mask_error(torch.ones(LENGTH, 6, dtype=torch.bool))
    assert text == (
        "the mask of shape [4, 6] fits no layer: a mask has the leading dimensions of a layer's "
        "input, and 'head' has inputs of shape [6, 5]. Nothing was changed; call zero_grad(), and "
        "set_mask(...) with another mask or None"
    )
    optimizer.zero_grad()
    optimizer.set_mask(None)
    step(model, optimizer, [(torch.randn(6, LENGTH, WIDTH, dtype=torch.float64), None)], told=False)
    assert set(updates(optimizer).values()) == {1}


def test_an_earlier_mask_that_fits_no_layer():
    """Micro-batches are checked each."""
    model = Tagger().double()
    optimizer = build("exact", model)
    for mask in (torch.ones(9), torch.ones(6, LENGTH)):
        optimizer.set_mask(mask.bool())
        model(torch.randn(6, LENGTH, WIDTH, dtype=torch.float64)).square().mean().backward()
    with pytest.raises(ValueError, match=re.escape("the mask of shape [9] fits no layer")):
        optimizer.step()


@pytest.mark.parametrize(
    ("mask", "error", "message"),
    [
        ([[True]], TypeError, "mask must be a tensor or None, got list"),
        (torch.ones(2, 3), TypeError, "mask is torch.float32, which could be a mask that is added"),
        (torch.ones(2, dtype=torch.complex64), TypeError, "mask is torch.complex64"),
        (torch.tensor(True), ValueError, "mask has no dimension: it must have those of a layer's"),
    ],
)
def test_what_is_no_mask(mask, error, message):
    model = Tagger().double()
    with pytest.raises(error, match=re.escape(message)):
        build("exact", model).set_mask(mask)


def test_masks_where_nothing_is_observed():
    """In steps that don't update, at rest, and once closed, they play no part."""
    model = Tagger().double()
    wrong = torch.ones(9, dtype=torch.bool)
    x = torch.randn(6, LENGTH, WIDTH, dtype=torch.float64)
    hybrid = mkor.HybridSwitch(at_step=2)
    optimizer = build("exact", model, warmup_steps=0, factor_update_steps=2, hybrid=hybrid)
    step(model, optimizer, [(x, None)])
    for _ in range(2):
        optimizer.set_mask(wrong)
        step(model, optimizer, [(x, None)], told=False)
    optimizer.close()
    optimizer.set_mask(wrong)
    loss = step(model, optimizer, [(x, None)], told=False)
    assert math.isfinite(loss)
