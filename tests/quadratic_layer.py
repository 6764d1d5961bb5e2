"""A layer under a quadratic loss, shown to K-BFGS in both passes of a step."""

import torch

from method_driver import LayerShape, Seen, finish, init
from mkor.methods.kbfgs import KBFGSMethod

F64 = torch.float64
SHAPE = LayerShape(2, 3, 4)
LEVEL = 0.3**0.5
SIDES = {"inputs": ("moment", "inputs", "weight"), "outputs": ("mean_outputs", "mean_grads")}
BAD = [float("nan"), float("inf"), float("-inf")]


def method(starting=True, **options):
    usual = {
        "damping": 0.3,
        "decay": 0.9,
        "pair_decay": 0.9,
        "memory": None,
        "max_dim": 64,
        "start_steps": 1,
        "state_dtype": None,
        "on_nonfinite": "skip",
    }
    return KBFGSMethod(**{**usual, **options}, starting=starting)


class Batch:
    """Rows of a layer and a loss ½(h − t)ᵀQ(h − t), averaged over the rows; a stack of them."""

    def __init__(self, shape=SHAPE, count=12, hessian=None, dtype=F64):
        self.inputs = torch.randn(shape.stack, count, shape.inputs, dtype=dtype)
        self.inputs[..., -1] = 1
        self.targets = torch.randn(shape.stack, count, shape.outputs, dtype=dtype)
        eye = torch.eye(shape.outputs, dtype=dtype)
        self.hessian = eye.expand(shape.stack, -1, -1) if hessian is None else hessian

    def grads(self, weight, part=slice(None)):
        """What autograd leaves of each row, [G, n, o]."""
        residuals = self.inputs[part] @ weight.mT - self.targets[part]
        return residuals @ self.hessian[part] / residuals.shape[1]

    def seen(self, weight, **more):
        return seen_of(self.inputs, self.grads(weight), weight, **more)

    def mean_output(self, weight):
        return (weight @ self.inputs.mean(dim=1)[..., None])[..., 0]


def seen_of(inputs, grads, weight, reduced=False, **more):
    rows = torch.tensor([float(inputs.shape[1])], dtype=inputs.dtype)
    return Seen(
        inputs.mT @ inputs,
        grads.sum(dim=1, keepdim=True),
        rows,
        torch.zeros(()),
        grads_reduced=reduced,
        samples=rows,
        input_sums=inputs.sum(dim=1),
        weight=weight,
        **more,
    )


def weights(shape=SHAPE, dtype=F64):
    return torch.randn(shape.stack, shape.outputs, shape.inputs, dtype=dtype)


def completed(generator):
    """What a generator returns on one worker; it may have nothing to exchange."""
    try:
        return finish(generator, next(generator))
    except StopIteration as stop:
        return stop.value


def run_first(method, state, seen):
    """The first pass alone."""
    return completed(method.update(state, seen))


def run_revisit(method, state, seen):
    return completed(method.revisit(state, seen))


def step(method, state, batch, weight, size=0.1):
    """Both passes with a random step between; the state and the new weight."""
    state = run_first(method, state, batch.seen(weight))
    weight = weight + size * torch.randn_like(weight)
    return run_revisit(method, state, batch.seen(weight)), weight


def trained(steps=5, shape=SHAPE, dtype=F64, **options):
    state, weight = init(method(**options), shape, dtype), weights(shape, dtype)
    for number in range(steps):
        now = method(starting=number == 0, **options)
        state, weight = step(now, state, Batch(shape, dtype=dtype), weight)
    return state


def copies(state):
    return {key: tensor.clone() for key, tensor in state.items()}


def damped_moment(state):
    """A + √λI, [G, i, i]."""
    moment = state["moment"] / state["weight"][:, None, None]
    return moment + LEVEL * torch.eye(moment.shape[-1], dtype=moment.dtype)


def textbook(inverse, s, y):
    """(I − ρsyᵀ)H(I − ρysᵀ) + ρssᵀ of one matrix."""
    rho = 1 / (s @ y)
    left = torch.eye(len(s), dtype=s.dtype) - rho * torch.outer(s, y)
    return left @ inverse @ left.T + rho * torch.outer(s, s)
