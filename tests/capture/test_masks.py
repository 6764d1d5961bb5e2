"""A masked call shows what the call shows without the rows that don't count."""

import dataclasses

import pytest
import torch
from torch import Tensor, nn

from layer_oracles import Observed
from mkor.methods.base import Moment, Rows, Sketch, Sums

CLOSE = {"rtol": 1e-10, "atol": 1e-11}
SAMPLES, TOKENS = 2, 5

KINDS = {
    "sums": Sums(),
    "blocks": Sums(2),
    "expand": Moment(),
    "reduce": Moment("reduce"),
    "counts": Moment(matrix=False),
    "sketch": Sketch(3),
    "rows": Rows(),
}

LAYERS = {
    "linear": (lambda: nn.Linear(3, 2, bias=False), (TOKENS, 3), (TOKENS, 2)),
    "linear with bias": (lambda: nn.Linear(3, 2), (TOKENS, 3), (TOKENS, 2)),
    "heads": (lambda: nn.Linear(3, 2), (TOKENS, 4, 3), (TOKENS, 4, 2)),
    "one row a sample": (lambda: nn.Linear(3, 2), (3,), (2,)),
    "convolution": (lambda: nn.Conv2d(2, 4, 2, groups=2), (2, 3, 4), (4, 2, 3)),
    "circular": (
        lambda: nn.Conv1d(2, 3, 3, padding=1, padding_mode="circular", bias=False),
        (2, 6),
        (3, 6),
    ),
    "transposed": (lambda: nn.ConvTranspose1d(2, 3, 2), (2, 3), (3, 4)),
}

TOKENWISE = [(name, "tokens") for name, (_, shape, _) in LAYERS.items() if shape[0] == TOKENS]


def seen(module, kind, inputs, grad, mask=None):
    module.zero_grad()
    observed = Observed(module, kinds=(kind, kind))
    observed.capture.mask.set(mask)
    module(inputs).backward(grad)
    observed.capture.mask.check()
    return observed.seen()


def assert_same_seen(masked, plain):
    """Every field but those of the weight's gradient, whose rows a mask leaves as they are."""
    for name, value in dataclasses.asdict(plain).items():
        other = getattr(masked, name)
        if isinstance(value, Tensor) and name not in ("gradient", "shown", "true"):
            torch.testing.assert_close(other, value, **CLOSE, msg=lambda m, n=name: f"{n}: {m}")
    assert masked.grads_reduced == plain.grads_reduced


def without_padding(shown):
    """Rows, of those that are not zero."""
    kept = shown.inputs.abs().sum(dim=(0, 2)) > 0
    assert not shown.grads[:, ~kept].any()
    return dataclasses.replace(shown, inputs=shown.inputs[:, kept], grads=shown.grads[:, kept])


def garbage(shape):
    return 100 * torch.randn(shape, dtype=torch.float64)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("layer", "by"), [*((name, "samples") for name in LAYERS), *TOKENWISE])
def test_padding_counts_nowhere(layer, kind, by):
    """Two samples more, or three tokens more a sample, with whatever in them."""
    make, shape, out = LAYERS[layer]
    module, kind = make().double(), KINDS[kind]
    inputs, grad = (torch.randn(SAMPLES, *s, dtype=torch.float64) for s in (shape, out))
    dim, more = (0, 2) if by == "samples" else (1, 3)
    mask = torch.ones(inputs.shape[: dim + 1], dtype=torch.long)

    def padded(tensor, filling):
        extra = list(tensor.shape)
        extra[dim] = more
        return torch.cat([tensor, filling(extra).to(tensor.dtype)], dim=dim)

    bias_shows = isinstance(kind, Sums) and module.bias is not None and "trans" not in layer
    grads = padded(grad, torch.zeros if bias_shows else garbage)
    masked = seen(module, kind, padded(inputs, garbage), grads, padded(mask, torch.zeros))
    plain = seen(module, kind, inputs, grad)
    if isinstance(kind, Rows):
        assert masked.inputs.shape[1] > plain.inputs.shape[1]
        masked = without_padding(masked)
    if isinstance(kind, Sums) and kind.blocks > 1 and by == "samples":
        # Blocks are cut from the batch as it is: what adds up is their sum.
        for side in ("inputs", "rows", "grads"):
            one, other = getattr(masked, side), getattr(plain, side)
            dims = 0 if side == "rows" else 1
            torch.testing.assert_close(one.sum(dim=dims), other.sum(dim=dims), **CLOSE)
        return
    assert_same_seen(masked, plain)


@pytest.mark.parametrize("kind", ["sums", "expand", "counts", "sketch", "rows"])
@pytest.mark.parametrize("bias", [True, False])
def test_samples_of_unequal_length(kind, bias):
    """Padded to the longest, or all tokens one after the other."""
    module, kind = nn.Linear(3, 2, bias=bias).double(), KINDS[kind]
    mask = torch.arange(TOKENS) < torch.tensor([[3], [5], [1], [0]])
    inputs, grad = garbage((4, TOKENS, 3)), garbage((4, TOKENS, 2))
    if bias and isinstance(kind, Sums):
        grad = grad.masked_fill(~mask[..., None], 0)
    masked = seen(module, kind, inputs, grad, mask)
    if isinstance(kind, Rows):
        masked = without_padding(masked)
    assert_same_seen(masked, seen(module, kind, inputs[mask], grad[mask]))


def test_a_sample_without_a_row_is_none():
    """In "reduce", where a sample is a row: the mean over tokens that count."""
    module = nn.Linear(3, 2).double()
    mask = torch.tensor([[1, 1, 0], [0, 0, 0], [0, 0, 1]])
    inputs, grad = garbage((3, 3, 3)), garbage((3, 3, 2))
    shown = seen(module, Moment("reduce"), inputs, grad, mask)
    a = torch.stack([inputs[0, :2].mean(dim=0), inputs[2, 2]])
    a = torch.cat([a, torch.ones(2, 1)], dim=1)
    g = torch.stack([grad[0, :2].sum(dim=0), grad[2, 2]])
    torch.testing.assert_close(shown.inputs[0], a.T @ a, **CLOSE)
    torch.testing.assert_close(shown.grads[0], g.T @ g, **CLOSE)
    assert (shown.rows.tolist(), shown.samples.tolist()) == ([2], [2])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layer", LAYERS)
def test_a_mask_of_ones_changes_nothing(layer, kind):
    make, shape, out = LAYERS[layer]
    module = make().double()
    inputs, grad = (torch.randn(SAMPLES, *s, dtype=torch.float64) for s in (shape, out))
    ones = torch.ones(SAMPLES, dtype=torch.bool)
    masked = seen(module, KINDS[kind], inputs, grad, ones)
    assert_same_seen(masked, seen(module, KINDS[kind], inputs, grad))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize("layer", LAYERS)
def test_an_empty_batch_shows_no_rows(layer, masked, kind):
    """As an expert sees that no token was sent to, alone or beside a batch."""
    make, shape, out = LAYERS[layer]
    module, kind = make().double(), KINDS[kind]
    mask = torch.ones(0, dtype=torch.bool) if masked else None
    empty = torch.zeros(0, *shape, dtype=torch.float64)
    alone = seen(module, kind, empty, torch.zeros(0, *out, dtype=torch.float64), mask)
    if alone is not None:
        assert not alone.rows.any()
        assert not alone.inputs.any() and not alone.grads.any()
    full, grad = (torch.randn(SAMPLES, *part, dtype=torch.float64) for part in (shape, out))
    plain = seen(module, kind, full, grad)
    module.zero_grad()
    observed = Observed(module, kinds=(kind, kind))
    for part in (full, empty):
        module(part).backward(grad[: len(part)])
    if not isinstance(kind, Sketch):  # whose signs are another call's
        assert_same_seen(observed.seen(), plain)


def test_values_that_are_not_finite_stay_where_they_are():
    module = nn.Linear(3, 2, bias=False).double()
    mask = torch.tensor([True, True, False])
    inputs = torch.randn(3, 3, dtype=torch.float64)
    inputs[2], grad = torch.nan, torch.randn(3, 2, dtype=torch.float64)
    for kind in KINDS.values():
        shown = seen(module, kind, inputs, grad, mask)
        assert torch.isfinite(shown.inputs).all() and torch.isfinite(shown.grads).all()


@pytest.mark.parametrize("kind", ["sums", "expand", "counts", "sketch"])
@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("cross", [True, False])
def test_attention(kind, batch_first, cross):
    """Padding of the queries; keys of another length are not masked by it."""
    torch.manual_seed(0)
    module = nn.MultiheadAttention(4, 2, batch_first=batch_first).double()
    with torch.no_grad():
        module.in_proj_bias.normal_()
    keys = torch.randn(2, 7 if cross else 5, 4, dtype=torch.float64)
    queries = torch.randn(2, 5, 4, dtype=torch.float64) if cross else keys
    pads = nn.functional.pad(queries, (0, 0, 0, 3))
    mask = nn.functional.pad(torch.ones(2, 5, dtype=torch.bool), (0, 3))
    ignored = None if cross else ~mask
    kinds = (KINDS[kind], KINDS[kind] if kind in ("sums", "sketch") else Sums())

    def run(queries, mask, ignored):
        module.zero_grad()
        observed = Observed(module, kinds=kinds)
        own = keys if cross else queries
        if not batch_first:
            queries, own = queries.transpose(0, 1), own.transpose(0, 1)
            mask = mask if mask is None else mask.T
        observed.capture.mask.set(mask)
        out = module(queries, own, own, key_padding_mask=ignored, need_weights=False)[0]
        out = out if batch_first else out.transpose(0, 1)
        out[:, :5].square().sum().backward()
        return [observed.seen(name) for name in observed.layers]

    for masked, plain in zip(run(pads, mask, ignored), run(queries, None, None), strict=True):
        if kind == "sketch" and cross and plain.inputs.shape[0] == 3:
            continue  # the start of the signs is the queries', the number of a key its own
        assert_same_seen(masked, plain)
