"""What the cases share: methods to run them on, training loops, snapshots and oracles."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import mkor

METHODS: dict[str, tuple[Callable[..., mkor.Preconditioner], dict[str, Any]]] = {
    "exact": (mkor.MKOR, {"rule": "exact"}),
    "exact-3": (mkor.MKOR, {"rule": "exact", "vectors": 3}),
    "paper": (mkor.MKOR, {"rule": "paper"}),
    "reference": (mkor.MKOR, {"rule": "reference"}),
    "reference-3": (mkor.MKOR, {"rule": "reference", "vectors": 3}),
    "window": (mkor.MKOR, {"representation": "window", "window": 4}),
    "dense-window": (mkor.MKOR, {"max_dim": 4, "wide_sides": "window", "window": 3}),
    "lowrank-sketch": (
        mkor.MKOR,
        {"representation": "lowrank", "statistic": "sketch", "vectors": 4, "rank": 6},
    ),
    "momentum-rms": (
        mkor.MKOR,
        {
            "representation": "lowrank",
            "statistic": "sketch",
            "vectors": 4,
            "rank": 6,
            "power": 0.75,
            "momentum": 0.5,
            "rescale": "rms",
        },
    ),
    "kfac-eigen": (mkor.KFAC, {"solver": "eigen"}),
    "kfac-inverse": (mkor.KFAC, {"solver": "inverse"}),
    "eva": (mkor.Eva, {}),
    "sngd": (mkor.SNGD, {}),
    "hylo-kis": (mkor.HyLo, {"sampling": "kis", "rank": 0.5}),
    "hylo-kid": (mkor.HyLo, {"sampling": "kid", "rank": 0.5}),
    "kbfgs": (mkor.KBFGS, {}),
    "kbfgs-memory": (mkor.KBFGS, {"memory": 5}),
}
"""Every method that must pass the cases, a class and its options each."""

KEEPS_NORM: dict[str, Any] = {"rescale": "gradient", "kl_clip": None}
"""Options under which an update has the norm of the gradient."""

every_method = pytest.mark.parametrize("method", METHODS)
every_optimizer = pytest.mark.parametrize("method", [*METHODS, "auto"])
"""Every method, and what `mkor.auto` makes of one on a base of its own."""

gradient_sized = pytest.mark.parametrize("method", [m for m in METHODS if m != "momentum-rms"])
"""Methods that can keep the norm of a gradient, and leave one alone that they know nothing of."""

one_or_three = pytest.mark.parametrize("vectors", [1, 3])

LR = 0.1
DECAY = 0.5


def sees_inside_attention(method: str) -> bool:
    """Whether sums of output gradients, which a bias shows, are enough for a method."""
    return METHODS[method][0] in (mkor.MKOR, mkor.Eva, mkor.KBFGS)


def evaluates_again(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a step evaluates the batch a second time, so that it needs a closure."""
    return isinstance(optimizer, mkor.KBFGS)


def sgd(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), **{"lr": LR, **options})


def build(
    method: str, model: nn.Module, base: torch.optim.Optimizer | None = None, **options: Any
) -> mkor.Preconditioner:
    """The method on a model; on plain SGD unless told, and "auto" always on its own base."""
    if method == "auto":
        return mkor.auto(model, **options)
    cls, own = METHODS[method]
    return cls(model, base or sgd(model), **{**own, **options})


def mlp(*widths: int, bias: bool = True) -> nn.Sequential:
    """Linear layers "0", "2", … with tanh between them."""
    layers: list[nn.Module] = []
    for inputs, outputs in itertools.pairwise(widths):
        layers += [nn.Linear(inputs, outputs, bias=bias), nn.Tanh()]
    return nn.Sequential(*layers[:-1])


class TwoHeads(nn.Module):
    """A trunk and two heads, one of which a forward pass runs."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(4, 8)
        self.a = nn.Linear(8, 2)
        self.b = nn.Linear(8, 3)

    def forward(self, x: Tensor, head: str) -> Tensor:
        out: Tensor = getattr(self, head)(self.trunk(x).tanh())
        return out


class Taken(NamedTuple):
    """What a step saw first: the loss, and the gradients before anything rewrote them."""

    loss: float
    grads: dict[str, Tensor]

    def within(self, module: str) -> dict[str, Tensor]:
        """The gradients of one module, named as it names its parameters."""
        start = f"{module}."
        own = {name: grad for name, grad in self.grads.items() if name.startswith(start)}
        return {name.removeprefix(start): grad for name, grad in own.items()}


def take_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loss: Callable[[], Tensor],
    backward: Callable[[Tensor], None] = Tensor.backward,
    set_to_none: bool = True,
) -> Taken:
    """One step on the loss that a function makes, in the way that the optimizer takes steps."""
    evaluations: list[Taken] = []

    def closure() -> Tensor:
        optimizer.zero_grad(set_to_none)
        value = loss()
        backward(value)
        evaluations.append(Taken(value.item(), gradients(model)))
        return value

    if evaluates_again(optimizer):
        optimizer.step(closure)  # type: ignore[arg-type]
    else:
        closure()
        optimizer.step()
    return evaluations[0]


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, batches: Iterable[Tensor], **kwargs: Any
) -> list[float]:
    """One step per batch on the mean square of the output; the losses."""
    return [
        take_step(model, optimizer, lambda b=batch: model(b, **kwargs).square().mean()).loss
        for batch in batches
    ]


def parameters(model: nn.Module) -> dict[str, Tensor]:
    """Copies of the parameters."""
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """Copies of the gradients that are there."""
    named = model.named_parameters()
    return {name: p.grad.detach().clone() for name, p in named if p.grad is not None}


def factors(optimizer: mkor.Preconditioner) -> dict[str, Tensor]:
    """Copies of the curvature state, by layer and key."""
    layers = optimizer.state_dict()["preconditioner"]["layers"]
    return {
        f"{name}.{key}": tensor.detach().clone()
        for name, layer in layers.items()
        for key, tensor in layer["state"].items()
    }


def updates(optimizer: mkor.Preconditioner) -> dict[str, int]:
    """Number of factor updates of each preconditioned layer."""
    return {info.name: info.updates for info in optimizer.layers() if info.preconditioned}


def reasons(optimizer: mkor.Preconditioner) -> dict[str, str | None]:
    """Why each layer that is not preconditioned isn't."""
    return {info.name: info.reason for info in optimizer.layers() if not info.preconditioned}


def after_steps(
    method: str, make: Callable[[], nn.Module], batches: Iterable[Tensor], **kwargs: Any
) -> dict[str, Tensor]:
    """Parameters and factors after training a freshly seeded model."""
    torch.manual_seed(1)
    model = make()
    optimizer = build(method, model)
    train(model, optimizer, batches, **kwargs)
    assert all(updates(optimizer).values())
    return parameters(model) | factors(optimizer)


def assert_same(left: dict[str, Tensor], right: dict[str, Tensor], tolerance: float = 0.0) -> None:
    """Both hold the same keys and values, bit for bit unless told."""
    assert left, "nothing to compare"
    assert left.keys() == right.keys()
    torch.testing.assert_close(left, right, rtol=tolerance, atol=tolerance)


def sgd_step(before: dict[str, Tensor], grads: dict[str, Tensor]) -> dict[str, Tensor]:
    """What plain SGD makes of parameters, by hand."""
    return {name: p - LR * grads[name] if name in grads else p for name, p in before.items()}


def observer(model: nn.Module, vectors: int = 1, **options: Any) -> mkor.MKOR:
    """MKOR whose factors after one update show the statistic itself, see `shown`."""
    raw = {"damping": None, "factor_decay": DECAY, "norm_limit": 1e9, "state_dtype": torch.float64}
    return mkor.MKOR(model, sgd(model), vectors=vectors, **{**raw, **options})


def shown(optimizer: mkor.Preconditioner, layer: str, side: str) -> Tensor:
    """The statistic VVᵀ [G, d, d] of one update of an `observer`, read off its inverse factor."""
    inverse = factors(optimizer)[f"{layer}.{side}"]
    eye = torch.eye(inverse.shape[-1], dtype=inverse.dtype)
    return (torch.linalg.inv(inverse) - DECAY * eye) / (1 - DECAY)


def outer(vector: Tensor) -> Tensor:
    return torch.outer(vector, vector).detach()


def input_moment(blocks: Iterable[Tensor], bias: bool) -> Tensor:
    """Σ_j (n_j/n)·m_j m_jᵀ over the means of blocks of rows [n_j, d], [1, d, d]."""
    blocks = [block.double() for block in blocks]
    total = sum(len(block) for block in blocks)
    means = [block.mean(dim=0) for block in blocks]
    if bias:
        means = [torch.cat([mean, mean.new_ones(1)]) for mean in means]
    parts = [outer(m) * len(b) / total for m, b in zip(means, blocks, strict=True)]
    return torch.stack(parts).sum(dim=0, keepdim=True)


def gradient_moment(blocks: Iterable[Tensor], bias: bool) -> Tensor:
    """The same of output gradients: n/n_j times the sum of block j; one block where a bias is."""
    blocks = [block.double() for block in blocks]
    if bias:
        blocks = [torch.cat(blocks)]
    total = sum(len(block) for block in blocks)
    parts = [outer(block.sum(dim=0)) * total / len(block) for block in blocks]
    return torch.stack(parts).sum(dim=0, keepdim=True)


def assert_moment(actual: Tensor, expected: Tensor) -> None:
    """Statistics agree, and aren't trivially zero."""
    size = expected.abs().max().item()
    assert size > 1e-8
    torch.testing.assert_close(actual, expected.double(), rtol=0, atol=1e-5 * size)


def nothing_seen(optimizer: mkor.Preconditioner) -> bool:
    """Whether no layer holds a statistic."""
    capture = optimizer._engine.capture
    return all(capture.collect(layer) is None for layer in capture.layers.values())
