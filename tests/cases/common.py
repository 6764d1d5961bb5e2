"""Small models, steps and float64 oracles for the cases on numerics, state and training."""

import copy
import itertools

import torch
import torch.nn.functional as F
from torch import nn

import mkor

RULES = ("exact", "paper", "reference")
VECTORS = (1, 3)
STATE_DTYPES = (None, torch.bfloat16, torch.float16)


def mlp(*sizes, bias=True, dtype=torch.float32):
    """A tanh network of the given widths, the same for the same widths."""
    torch.manual_seed(1)
    layers = []
    for inputs, outputs in itertools.pairwise(sizes):
        layers += [nn.Linear(inputs, outputs, bias=bias, dtype=dtype), nn.Tanh()]
    return nn.Sequential(*layers[:-1])


def wrap(model, lr=0.1, momentum=0.0, **options):
    """MKOR on SGD with an update in every step; the stabiliser acts only where a test says so."""
    base = torch.optim.SGD(model.parameters(), lr=lr, momentum=momentum)
    settings = {"factor_update_steps": 1, "damping": 0.1, "norm_limit": 100.0, **options}
    return mkor.MKOR(model, base, **settings)


def batches(count, rows, inputs, outputs, dtype=torch.float32):
    """Random inputs with a nonzero mean, and random targets."""
    source = torch.Generator().manual_seed(2)
    return [
        (
            torch.randn(rows, inputs, generator=source, dtype=dtype) + 0.5,
            torch.randn(rows, outputs, generator=source, dtype=dtype),
        )
        for _ in range(count)
    ]


def train(model, optimizer, data, loss=F.mse_loss):
    """One step a batch; the losses."""
    losses = []
    for x, y in data:
        value = loss(model(x), y)
        value.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(value.item())
    return losses


def factors(optimizer):
    """Copies of the inverse factors by (layer, side)."""
    layers = optimizer.state_dict()["preconditioner"]["layers"]
    return {
        (name, side): tensor.detach().clone()
        for name, layer in layers.items()
        for side, tensor in layer["state"].items()
        if side in ("inputs", "outputs")
    }


def counters(optimizer):
    """Skipped statistics, resets and blends over all layers."""
    infos = optimizer.layers()
    return {key: sum(getattr(i, key) for i in infos) for key in ("skipped", "resets", "blends")}


def parameters(model):
    """Copies of the parameters."""
    return [p.detach().clone() for p in model.parameters()]


def assert_same(left, right):
    """Two models, lists or dicts of tensors are equal to the last bit."""
    left, right = as_dict(left), as_dict(right)
    assert left.keys() == right.keys()
    for key in left:
        assert torch.equal(left[key], right[key]), key


def assert_close(left, right, rtol=1e-5, atol=1e-6):
    """Two models, lists or dicts of tensors agree."""
    left, right = as_dict(left), as_dict(right)
    assert left.keys() == right.keys() and left
    for key in left:
        torch.testing.assert_close(left[key], right[key], rtol=rtol, atol=atol, msg=str(key))


def as_dict(value):
    if isinstance(value, nn.Module):
        return copy.copy(value.state_dict())
    return value if isinstance(value, dict) else dict(enumerate(value))


def assert_finite(model, optimizer):
    """Parameters and factors hold no infinity and no NaN."""
    for key, tensor in {**as_dict(model), **factors(optimizer)}.items():
        assert torch.isfinite(tensor).all(), key


def mean_vectors(rows, blocks):
    """The vectors √(n_j/n)·m_j of contiguous blocks of rows [n, d], as columns in float64."""
    rows = rows.detach().double()
    samples = rows.shape[0]
    bounds = [-(-j * samples // blocks) for j in range(blocks + 1)]
    parts = [rows[a:b] for a, b in itertools.pairwise(bounds)]
    return torch.stack(
        [p.mean(0) * (len(p) / samples) ** 0.5 if len(p) else rows.new_zeros(rows.shape[1])
         for p in parts],
        dim=1,
    )  # fmt: skip


def with_ones(rows):
    """Rows [n, i] with the column of the bias."""
    return torch.cat([rows, rows.new_ones(rows.shape[0], 1)], dim=1)


def dense_factor(rule, sequence, damping=0.1, decay=0.9, blend=0.95):
    """The inverse factor after a sequence of vectors V [d, r], by dense float64 formulas."""
    inverse = torch.eye(sequence[0].shape[0], dtype=torch.float64)
    eye = inverse.clone()
    for vectors in sequence:
        v = vectors.double()
        if damping is not None:
            v = v / (damping**0.5 * v.norm())
        if rule == "exact":
            inverse = torch.linalg.inv(decay * torch.linalg.inv(inverse) + (1 - decay) * v @ v.T)
        elif rule == "reference":
            blended = blend * inverse + (1 - blend) * eye
            inverse = torch.linalg.inv(torch.linalg.inv(blended) + v @ v.T)
        else:
            for column in v.split(1, dim=1):
                image = inverse @ column
                along = (column.T @ image).item()
                gain = (1 - decay) / (decay**2 * (1 + decay * (1 - decay) * along))
                inverse = decay * inverse + gain * image @ image.T
    return inverse
