"""K-BFGS: both passes against formulas written out."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from method_driver import LayerShape, happened, init
from mkor.methods.base import Moment, Sums
from quadratic_layer import (
    F64,
    LEVEL,
    SHAPE,
    Batch,
    damped_moment,
    method,
    run_first,
    run_revisit,
    seen_of,
    step,
    textbook,
    trained,
    weights,
)

# --- the input side ------------------------------------------------------------------------------


def test_the_moment_is_a_moving_average_freed_of_its_start():
    state, expected, total = init(method(), SHAPE, F64), 0, 0
    for _ in range(6):
        batch = Batch()
        state = run_first(method(), state, batch.seen(weights()))
        expected = 0.9 * expected + 0.1 * batch.inputs.mT @ batch.inputs / 12
        total = 0.9 * total + 0.1
        torch.testing.assert_close(state["moment"], expected)
        torch.testing.assert_close(state["weight"], torch.full((2,), total, dtype=F64))


def test_at_the_start_the_input_factor_is_the_inverse():
    state = init(method(), SHAPE, F64)
    for _ in range(3):
        state = run_first(method(starting=True), state, Batch().seen(weights()))
        torch.testing.assert_close(state["inputs"], torch.linalg.inv(damped_moment(state)))


def test_the_hessian_action_is_bfgs_with_the_action_of_the_moment():
    state = run_first(method(), init(method(), SHAPE, F64), Batch().seen(weights()))
    for _ in range(5):
        before, batch = state["inputs"].clone(), Batch()
        state = run_first(method(starting=False), state, batch.seen(weights()))
        for g in range(2):
            s = before[g] @ batch.inputs[g].mean(dim=0)
            y = damped_moment(state)[g] @ s
            torch.testing.assert_close(state["inputs"][g], textbook(before[g], s, y))
            torch.testing.assert_close(state["inputs"][g] @ y, s)
    assert int(state["events"].sum()) == 0


def test_the_hessian_action_approaches_the_inverse():
    """In the norm that BFGS measures by, every update of a fixed A comes closer."""
    eye, errors = torch.eye(5, dtype=F64), []
    state = init(method(), LayerShape(1, 2, 5), F64)
    state["weight"].fill_(0.7)
    state["moment"] = 2.1 * torch.diag_embed(torch.rand(1, 5, dtype=F64))
    damped = damped_moment(state)[0]
    root = damped.sqrt()  # of a diagonal matrix
    for _ in range(30):
        errors.append(float((root @ state["inputs"][0] @ root - eye).norm()))
        means = torch.randn(1, 5, dtype=F64)
        method()._act(state, means, torch.ones(1, dtype=torch.bool))
    assert all(after <= before + 1e-12 for before, after in pairwise(errors))
    plain = float((state["inputs"][0] @ damped - eye).norm())
    assert errors[-1] < 0.1 * errors[0] and plain < 0.1 * float((damped - eye).norm())


def test_a_moment_without_a_cholesky_factor_leaves_the_last_inverse():
    state = trained(2)
    before = state["inputs"].clone()
    seen = Batch().seen(weights())
    seen.inputs[1] = -1e3 * torch.eye(4, dtype=F64)
    state = run_first(method(), state, seen)
    assert happened(state)["rejected"] == 1
    assert torch.equal(state["inputs"][1], before[1])
    assert not torch.equal(state["inputs"][0], before[0])


def test_without_an_inverse_to_start_from_it_is_the_identity():
    batch, eye = Batch(), torch.eye(4, dtype=F64)
    state = run_first(method(starting=False), init(method(), SHAPE, F64), batch.seen(weights()))
    for g in range(2):
        s = batch.inputs[g].mean(dim=0)
        expected = textbook(eye, s, damped_moment(state)[g] @ s)
        torch.testing.assert_close(state["inputs"][g], expected)


# --- the output side -----------------------------------------------------------------------------


def test_the_first_pass_keeps_what_the_second_compares_with():
    batch, weight = Batch(), weights()
    state = run_first(method(), init(method(), SHAPE, F64), batch.seen(weight))
    torch.testing.assert_close(state["mean_outputs"], batch.mean_output(weight))
    torch.testing.assert_close(state["mean_grads"], batch.grads(weight).sum(dim=1))
    assert state["pending"].all()
    assert torch.equal(state["outputs"], torch.eye(3, dtype=F64).repeat(2, 1, 1))
    state = run_revisit(method(), state, batch.seen(weight + 0.1))
    assert not state["pending"].any()


@pytest.mark.parametrize("curvature", [0.1, 1.0, 5.0])
def test_the_second_pass_is_bfgs_of_averaged_and_twice_damped_pairs(curvature):
    """The slow way for several steps: averages, Powell on H, Powell on I, the textbook formula."""
    hessian = curvature * torch.eye(3, dtype=F64).repeat(2, 1, 1)
    state, weight = init(method(), SHAPE, F64), weights()
    expected = torch.eye(3, dtype=F64).repeat(2, 1, 1)
    mean_s = mean_y = torch.zeros(2, 3, dtype=F64)
    changed = 0
    for _ in range(6):
        batch = Batch(hessian=hessian)
        old = weight
        state, weight = step(method(), state, batch, weight)
        mean_s = 0.9 * mean_s + 0.1 * (batch.mean_output(weight) - batch.mean_output(old))
        difference = batch.grads(weight).sum(dim=1) - batch.grads(old).sum(dim=1)
        mean_y = 0.9 * mean_y + 0.1 * difference
        for g in range(2):
            s, y, damped = mean_s[g], mean_y[g], False
            along, curve = s @ y, y @ expected[g] @ y
            if along < 0.2 * curve:
                theta, damped = 0.8 * curve / (curve - along), True
                s = theta * s + (1 - theta) * (expected[g] @ y)
            along, square = s @ y, s @ s
            if along < LEVEL * square:
                theta, damped = (1 - LEVEL) * square / (square - along), True
                y = theta * y + (1 - theta) * s
            expected[g] = textbook(expected[g], s, y)
            changed += damped
        torch.testing.assert_close(state["outputs"], expected, rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(state["s"], mean_s)
        torch.testing.assert_close(state["y"], mean_y)
    assert happened(state) == ({"damped": changed} if changed else {})
    assert (changed > 0) is (curvature != 1.0)


def test_the_secant_equation_holds_where_no_damping_is_needed():
    state, weight = init(method(pair_decay=0.0), SHAPE, F64), weights()
    batch = Batch()
    before = weight
    state, weight = step(method(pair_decay=0.0), state, batch, weight)
    s = batch.mean_output(weight) - batch.mean_output(before)
    y = batch.grads(weight).sum(dim=1) - batch.grads(before).sum(dim=1)
    torch.testing.assert_close((state["outputs"] @ y[..., None])[..., 0], s)
    assert int(state["events"].sum()) == 0


@pytest.mark.parametrize("memory", [None, 100])
@pytest.mark.parametrize("pair_decay", [0.0, 0.9])
def test_it_finds_the_inverse_hessian_of_a_quadratic_loss(memory, pair_decay):
    now = method(memory=memory, pair_decay=pair_decay)
    hessian = torch.diag_embed(torch.tensor([[0.7, 1.5, 4.0], [1.0, 2.0, 3.0]], dtype=F64))
    turn = torch.linalg.qr(torch.randn(2, 3, 3, dtype=F64))[0]
    hessian = turn @ hessian @ turn.mT
    state, weight = init(now, SHAPE, F64), weights()
    for _ in range(60):
        state, weight = step(now, state, Batch(hessian=hessian), weight)
    eye = torch.eye(3, dtype=F64).expand(2, -1, -1)
    gradient = torch.cat([hessian, torch.zeros(2, 3, 1, dtype=F64)], dim=-1)  # [G, o, i]
    found = now.precondition({k: v for k, v in state.items() if k != "inputs"}, gradient)
    # Averaged pairs are nearly parallel, which takes longer.
    tolerance = 1e-3 if pair_decay == 0 else 2e-2
    torch.testing.assert_close(found[..., :3], eye, rtol=0, atol=tolerance)


def test_negative_curvature_keeps_the_factor_positive_definite():
    hessian = -2 * torch.eye(3, dtype=F64).repeat(2, 1, 1)
    hessian[1] = torch.diag(torch.tensor([1.0, -1.0, 0.0], dtype=F64))
    for memory in (None, 4):
        now = method(memory=memory)
        state, weight = init(now, SHAPE, F64), weights()
        for _ in range(100):
            state, weight = step(now, state, Batch(hessian=hessian), weight)
            gradient = torch.randn(2, 3, 4, dtype=F64)
            out = now.precondition(state, gradient)
            assert ((out * gradient).sum(dim=(-2, -1)) > 0).all()
        assert happened(state).keys() == {"damped"} and happened(state)["damped"] >= 100


def test_a_memory_that_dropped_nothing_preconditions_like_the_matrix():
    torch.manual_seed(3)
    dense = trained(8)
    torch.manual_seed(3)
    limited = trained(8, memory=8)
    gradient = torch.randn(2, 3, 4, dtype=F64)
    torch.testing.assert_close(
        method().precondition(dense, gradient), method(memory=8).precondition(limited, gradient)
    )
    assert torch.equal(dense["events"], limited["events"])


def test_no_step_is_no_pair():
    """Weights that did not move give s = y = 0, which says nothing."""
    batch, weight = Batch(), weights()
    state = run_first(method(), init(method(), SHAPE, F64), batch.seen(weight))
    before = state["outputs"].clone()
    state = run_revisit(method(), state, batch.seen(weight))
    assert torch.equal(state["outputs"], before)
    assert happened(state) == {"rejected": 2}


@pytest.mark.parametrize("scale", [1.0, 65536.0])
def test_a_loss_scale_comes_out_in_both_passes(scale):
    batch, weight, true = Batch(), weights(), torch.randn(2, 3, dtype=F64)
    later = weight + 0.1 * weights()
    states = []
    for factor in (1.0, scale):
        more = {"shown": factor * true, "true": true}
        state = init(method(), SHAPE, F64)
        for run, at in ((run_first, weight), (run_revisit, later)):
            seen = seen_of(batch.inputs, factor * batch.grads(at), at, **more)
            state = run(method(), state, seen)
        states.append(state)
    for key in states[0]:
        torch.testing.assert_close(states[0][key], states[1][key])


# --- preconditioning -----------------------------------------------------------------------------


def test_the_gradient_is_taken_between_the_factors():
    state, gradient = trained(), torch.randn(2, 3, 4, dtype=F64)
    expected = torch.stack([state["outputs"][g] @ gradient[g] @ state["inputs"][g] for g in (0, 1)])
    torch.testing.assert_close(method().precondition(state, gradient), expected)


@pytest.mark.parametrize(
    ("shape", "options", "keys"),
    [
        (LayerShape(1, 3, 9), {"max_dim": 5}, {"outputs"}),
        (LayerShape(1, 9, 3), {"max_dim": 5}, {"inputs"}),
        (LayerShape(1, 9, 3), {"max_dim": 5, "memory": 2}, {"inputs", "steps"}),
        (LayerShape(1, 9, 9), {"max_dim": 5, "memory": 2}, {"steps"}),
    ],
)
def test_a_side_that_is_too_wide_has_no_matrix(shape, options, keys):
    now = method(**options)
    state = trained(3, shape, **options)
    assert {"outputs", "inputs", "steps"} & state.keys() == keys
    gradient = torch.randn(1, shape.outputs, shape.inputs, dtype=F64)
    out = now.precondition(state, gradient)
    assert out.shape == gradient.shape and not torch.equal(out, gradient)
    assert any(now.sides(shape)) and "max_dim=5" in now.limit()


def test_a_layer_without_an_input_factor_needs_no_moment():
    shape, now = LayerShape(1, 3, 9), method(max_dim=5)
    assert now.wants(shape) == (Moment(matrix=False), Sums(1))
    assert now.wants(SHAPE) == (Moment(), Sums(1))
    batch, weight = Batch(shape), weights(shape)
    seen = batch.seen(weight)
    bare = replace(seen, inputs=seen.inputs[:, :0, :0])
    states = [run_first(now, init(now, shape, F64), each) for each in (seen, bare)]
    assert all(torch.equal(states[0][key], states[1][key]) for key in states[0])
