"""A matrix on the narrow side and rows on the wide one, against both sides' inverses by hand."""

import pytest
import torch

import dense_oracles as oracle
from method_driver import LayerShape, Seen, init, run_update
from mkor.methods.mkor import MKORMethod
from mkor.methods.statistics import loss_scale

NARROW, WIDE, STACK, COUNT = 4, 9, 2, 3
DECAY, DAMPING = 0.8, 0.3
CLOSE = {"rtol": 1e-9, "atol": 1e-11}


def method(wide_sides, **options):
    usual = {"decay": DECAY, "damping": DAMPING, "norm_limit": 1e30, "blend": 0.95}
    kept = {"max_dim": NARROW, "wide_sides": wide_sides, "count": COUNT}
    rest = {"rule": "exact", "vectors": 1, "state_dtype": None, "on_nonfinite": "skip"}
    return MKORMethod(**{**usual, **kept, **rest, **options})


def damped(covariance):
    """β(C + βI)⁻¹ with β = μ·tr(C)."""
    beta = DAMPING * covariance.trace()
    return beta * torch.linalg.inv(covariance + beta * torch.eye(len(covariance)).double())


def windowed(means):
    """The inverse of Σ w_i v_i v_iᵀ over the last vectors, weights by their age."""
    last = means[-COUNT:]
    weights = [DECAY ** (len(last) - 1 - j) for j in range(len(last))]
    parts = [w / sum(weights) * torch.outer(v, v) for w, v in zip(weights, last, strict=True)]
    return damped(sum(parts))


def truncated(means):
    """The inverse of the leading part of the moving average, damped by the whole trace."""
    covariance, trace = torch.zeros(WIDE, WIDE).double(), 0.0
    for v in means:
        covariance = DECAY * covariance + (1 - DECAY) * torch.outer(v, v)
        trace = DECAY * trace + (1 - DECAY) * float(v @ v)
        values, turns = torch.linalg.eigh(covariance)
        values[:-COUNT] = 0
        covariance = turns @ torch.diag(values) @ turns.T
    beta = DAMPING * trace
    return beta * torch.linalg.inv(covariance + beta * torch.eye(WIDE).double())


def recursive(means):
    """The exact rule from the identity; each update weighs 1/μ in the trace."""
    inverse = torch.eye(NARROW).double()
    for v in means:
        inverse, _ = oracle.exact(inverse, (v / (DAMPING**0.5 * v.norm()))[:, None], DECAY)
    return inverse


KINDS = {"window": windowed, "lowrank": truncated}
kinds = pytest.mark.parametrize("wide_sides", KINDS)
SHAPES = {"outputs": LayerShape(STACK, WIDE, NARROW), "inputs": LayerShape(STACK, NARROW, WIDE)}
wides = pytest.mark.parametrize("wide", SHAPES)


def seen_of(inputs, grads, scale=1.0):
    """What a layer shows of rows [G, n, d], of a loss multiplied by `scale`."""
    n = inputs.shape[1]
    true = torch.einsum("gno,gni->go", grads, inputs) / n  # sums of the gradient's entries
    return Seen(
        inputs.sum(dim=1, keepdim=True),
        scale * grads.sum(dim=1, keepdim=True) / n,
        torch.tensor([float(n)], dtype=torch.float64),
        scale * torch.zeros(()),
        grads_reduced=False,
        shown=scale * true,
        true=true,
    )


def random_rows(shape, updates):
    for j in range(updates):
        inputs = 0.3 + torch.randn(STACK, 8, shape.inputs, dtype=torch.float64)
        yield inputs, (1 + j) * (0.3 + torch.randn(STACK, 8, shape.outputs, dtype=torch.float64))


@wides
@kinds
def test_each_side_is_the_inverse_of_its_own_kind(wide_sides, wide):
    shape, mkor = SHAPES[wide], method(wide_sides)
    state = init(mkor, shape, torch.float64)
    means = {"inputs": [], "outputs": []}
    for inputs, grads in random_rows(shape, 7):
        state = run_update(mkor, state, seen_of(inputs, grads))
        means["inputs"].append(inputs.mean(dim=1))
        means["outputs"].append(grads.mean(dim=1))
    narrow = "inputs" if wide == "outputs" else "outputs"
    assert state[wide].shape == (STACK, COUNT, WIDE)
    assert state[narrow].shape == (STACK, NARROW, NARROW)
    grad = torch.randn(STACK, shape.outputs, shape.inputs, dtype=torch.float64)
    out = mkor.precondition(state, grad)
    for g in range(STACK):
        own = {side: [v[g] for v in vectors] for side, vectors in means.items()}
        factor = {wide: KINDS[wide_sides](own[wide]), narrow: recursive(own[narrow])}
        torch.testing.assert_close(state[narrow][g], factor[narrow], **CLOSE)
        torch.testing.assert_close(out[g], factor["outputs"] @ grad[g] @ factor["inputs"], **CLOSE)


@kinds
def test_vectors_of_losses_on_other_scales_are_made_comparable(wide_sides):
    """Each update's loss has a scale of its own, as under a loss scaler that changes it."""
    shape, mkor = SHAPES["outputs"], method(wide_sides)
    assert mkor.absolute()
    states = []
    for scales in ([1.0] * 5, [1.0, 2.0**16, 2.0**15, 2.0**-9, 1e6]):
        torch.manual_seed(0)
        state = init(mkor, shape, torch.float64)
        for scale, rows in zip(scales, random_rows(shape, 5), strict=True):
            seen = seen_of(*rows, scale)
            torch.testing.assert_close(
                loss_scale(seen.shown, seen.true), torch.tensor(1 / scale).double()
            )
            state = run_update(mkor, state, seen)
        states.append(state)
    grad = torch.randn(STACK, WIDE, NARROW, dtype=torch.float64)
    plain, scaled = (mkor.precondition(state, grad) for state in states)
    torch.testing.assert_close(scaled, plain, **CLOSE)


@kinds
def test_both_sides_may_be_wide_or_narrow(wide_sides):
    """Rows on both are what the representation of that name keeps; matrices, what dense keeps."""
    for limit, same_as in ((NARROW - 1, wide_sides), (WIDE, "dense")):
        mixed = method(wide_sides, max_dim=limit)
        alone = method(None, representation=same_as, max_dim=WIDE)
        states = []
        for mkor in (mixed, alone):
            torch.manual_seed(1)
            state = init(mkor, SHAPES["inputs"], torch.float64)
            for rows in random_rows(SHAPES["inputs"], 5):
                state = run_update(mkor, state, seen_of(*rows))
            states.append(state)
        assert states[0].keys() == states[1].keys()
        assert all(torch.equal(states[0][key], states[1][key]) for key in states[0])
        grad = torch.randn(STACK, NARROW, WIDE, dtype=torch.float64)
        assert torch.equal(*(m.precondition(states[0], grad) for m in (mixed, alone)))


def test_the_work_of_a_layer_is_told_by_the_entries_of_its_factors():
    shape = LayerShape(2, 30_000, 64)
    window, none = (method(kind, max_dim=1024, count=100) for kind in ("window", None))
    assert window.cost(shape) == 2 * (30_000 * 100 + 64**2)
    assert none.cost(shape) == 2 * 64**2
    assert window.cost(LayerShape(1, 64, 64)) == 2 * 64**2
