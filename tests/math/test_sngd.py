"""SNGD against the dense natural gradient, and what keeps it finite."""

from dataclasses import replace

import pytest
import torch

from mkor.methods.base import Exchange, LayerShape, Rows
from mkor.methods.hylo import SNGDMethod
from row_driver import (
    copies,
    equal,
    events,
    fisher,
    natural,
    random_rows,
    run,
    run_workers,
    seen_of,
    start,
)

SHAPES = [LayerShape(1, 4, 5), LayerShape(3, 2, 4), LayerShape(1, 1, 1)]
BAD = [float("nan"), float("inf"), float("-inf")]


def method(damping=0.3, state_dtype=None, on_nonfinite="skip"):
    return SNGDMethod(damping, state_dtype, on_nonfinite)


def gradient(shape, seed=9, dtype=torch.float64):
    source = torch.Generator().manual_seed(seed)
    size = (shape.stack, shape.outputs, shape.inputs)
    return torch.randn(size, generator=source, dtype=dtype)


def updated(sngd, shape, rows=12, seed=0, dtype=torch.float64):
    a, g = random_rows(shape, rows, seed, dtype)
    return run(sngd, start(sngd, shape, dtype), seen_of(sngd, a, g))


def test_all_rows_of_both_sides_are_wanted():
    assert method().wants(SHAPES[0]) == (Rows(), Rows())
    assert method().absolute()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("rows", [1, 3, 40])
@pytest.mark.parametrize("damping", [1e-3, 0.3, 10.0])
def test_a_step_is_the_dense_natural_gradient(shape, rows, damping):
    sngd = method(damping)
    a, g = random_rows(shape, rows)
    state = run(sngd, start(sngd, shape), seen_of(sngd, a, g))
    grad = gradient(shape)
    expected = natural(fisher(a, g), damping, grad)
    torch.testing.assert_close(sngd.precondition(state, grad), expected, rtol=1e-9, atol=1e-12)
    assert state["inputs"].shape == a.shape and state["outputs"].shape == g.shape
    assert events(state, "skipped", "rejected", "resets") == [0, 0, 0]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_before_the_first_update_a_gradient_stays_as_it_is(shape):
    sngd = method()
    state = start(sngd, shape)
    grad = gradient(shape)
    out = sngd.precondition(state, grad)
    assert torch.equal(out, grad) and out.data_ptr() != grad.data_ptr()
    size = sum(t.numel() * t.element_size() for t in state.values())
    assert sngd.bytes(shape, torch.float64) == size


def test_an_update_replaces_the_rows_of_the_last_one():
    sngd, shape = method(), SHAPES[0]
    state = updated(sngd, shape, rows=12, seed=1)
    a, g = random_rows(shape, 7, seed=2)
    state = run(sngd, state, seen_of(sngd, a, g))
    grad = gradient(shape)
    expected = natural(fisher(a, g), 0.3, grad)
    torch.testing.assert_close(sngd.precondition(state, grad), expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("sizes", [(6, 6), (9, 3), (5, 0), (4, 1, 7)])
def test_workers_are_one_worker_on_the_union_of_their_rows(sizes):
    """However unevenly the rows are spread: each g carries 1 over its own worker's rows."""
    sngd, shape = method(), SHAPES[1]
    a, g = random_rows(shape, sum(sizes))
    parts = zip(a.split(sizes, dim=1), g.split(sizes, dim=1), strict=True)
    seen = [seen_of(sngd, *part) for part in parts]
    states = run_workers(sngd, [start(sngd, shape) for _ in sizes], seen)
    assert all(equal(states[0], state) for state in states[1:])
    grad = gradient(shape)
    expected = natural(fisher(a, g), 0.3, grad)
    torch.testing.assert_close(sngd.precondition(states[0], grad), expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("scale", [2.0**16, 0.125, 1.0])
def test_a_loss_scale_comes_out(scale, workers):
    """The gradient was unscaled before the step; the rows tell by how much it shrank."""
    sngd, shape = method(), SHAPES[1]
    a, g = random_rows(shape, 12)
    true = torch.einsum("gno,gni->go", g / 12, a)
    seen = []
    for k in range(workers):
        part = [side.chunk(workers, dim=1)[k] for side in (a, g)]
        shown = scale * torch.einsum("gno,gni->go", part[1] / part[1].shape[1], part[0])
        seen.append(replace(seen_of(sngd, *part, loss_scale=scale), shown=shown, true=true))
    states = run_workers(sngd, [start(sngd, shape) for _ in seen], seen)
    grad = gradient(shape)
    expected = natural(fisher(a, g), 0.3, grad)
    torch.testing.assert_close(sngd.precondition(states[0], grad), expected, rtol=1e-9, atol=1e-12)


def test_scale_and_counts_cross_before_the_rows():
    sngd, shape = method(), SHAPES[0]
    a, g = random_rows(shape, 5)
    seen = replace(seen_of(sngd, a, g), shown=torch.ones(1, 4), true=torch.ones(1, 4))
    generator = sngd.update(start(sngd, shape), seen)
    first = next(generator)
    assert type(first) is Exchange
    assert (set(first.sum), set(first.mean), first.gather) == ({"rows"}, {"shown"}, {})
    second = generator.send({**first.sum, **first.mean})
    assert (second.sum, second.mean) == ({}, {})
    assert {key: tuple(t.shape) for key, t in second.gather.items()} == {
        "inputs": (1, 5, 5),
        "outputs": (1, 5, 4),
    }


def test_no_rows_at_all_change_nothing():
    sngd, shape = method(), SHAPES[1]
    state = updated(sngd, shape)
    before = copies(state)
    a, g = random_rows(shape, 1)
    none = seen_of(sngd, a[:, :0], g[:, :0].clone())
    assert equal(run(sngd, state, replace(none, rows=torch.zeros(1))), before)


@pytest.mark.parametrize("part", ["inputs", "grads"])
@pytest.mark.parametrize("bad", BAD)
def test_rows_that_are_not_finite_leave_their_matrix_alone(bad, part):
    sngd, shape = method(), SHAPES[1]
    state = updated(sngd, shape, seed=1)
    before = copies(state)
    good = updated(sngd, shape, seed=2)
    seen = seen_of(sngd, *random_rows(shape, 12, seed=2))
    getattr(seen, part)[1, 3, 0] = bad
    state = run(sngd, state, seen)
    for key in ("inputs", "outputs", "kernel", "damping"):
        assert torch.equal(state[key][1], before[key][1])
        assert torch.equal(state[key][[0, 2]], good[key][[0, 2]])
    assert events(state, "skipped", "rejected", "resets") == [1, 0, 0]


def test_with_another_number_of_rows_they_leave_the_gradient_as_it_is():
    """The old rows no longer fit beside those of the other matrices of the stack."""
    sngd, shape = method(), SHAPES[1]
    state = updated(sngd, shape, rows=12)
    seen = seen_of(sngd, *random_rows(shape, 7))
    seen.grads[1, 0, 0] = float("nan")
    state = run(sngd, state, seen)
    grad = gradient(shape)
    out = sngd.precondition(state, grad)
    assert torch.equal(out[1], grad[1]) and not torch.equal(out[0], grad[0])
    assert events(state, "skipped", "rejected", "resets") == [1, 0, 1]


def test_reset_mode_forgets_the_rows_of_the_matrix_that_is_not_finite():
    sngd, shape = method(on_nonfinite="reset"), SHAPES[1]
    state = updated(sngd, shape)
    seen = seen_of(sngd, *random_rows(shape, 12, seed=1))
    seen.inputs[2, 0, 0] = float("inf")
    state = run(sngd, state, seen)
    grad = gradient(shape)
    out = sngd.precondition(state, grad)
    assert torch.equal(out[2], grad[2]) and not torch.equal(out[:2], grad[:2])
    assert events(state, "skipped", "rejected", "resets") == [1, 0, 1]


def test_a_kernel_without_factor_is_rejected():
    """Finite rows whose products overflow."""
    sngd, shape = method(), SHAPES[0]
    state = updated(sngd, shape, dtype=torch.float32)
    before = copies(state)
    a, g = random_rows(shape, 12, dtype=torch.float32)
    state = run(sngd, state, seen_of(sngd, a * 1e18, g * 1e18))
    assert events(state, "skipped", "rejected", "resets") == [0, 1, 0]
    assert equal({**state, "events": 0 * state["events"]}, before)


@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e6])
@pytest.mark.parametrize("damping", [1e-12, 1e-4])
def test_rows_that_repeat_each_other_are_no_trouble(damping, scale):
    """K has rank one and μ is below its rounding: the damping is raised to that."""
    sngd, shape = method(damping), LayerShape(2, 8, 9)
    a, g = random_rows(shape, 1, dtype=torch.float32)
    a, g = a.expand(-1, 256, -1), scale * g.expand(-1, 256, -1)
    state = run(sngd, start(sngd, shape, torch.float32), seen_of(sngd, a, g))
    assert events(state, "skipped", "rejected") == [0, 0]
    trace = state["inputs"].square().sum(-1) * state["outputs"].square().sum(-1)
    least = torch.finfo(torch.float32).eps * trace.sum(-1)
    assert (state["damping"] >= least).all() and (state["damping"] >= damping).all()
    grad = gradient(shape, dtype=torch.float32)
    out = sngd.precondition(state, grad)
    assert torch.isfinite(out).all() and (out * grad).sum() > 0


@pytest.mark.parametrize("rows", [4, 64])
def test_rows_of_zeros_only_scale(rows):
    sngd, shape = method(0.25), SHAPES[0]
    a, g = random_rows(shape, rows)
    state = run(sngd, start(sngd, shape), seen_of(sngd, a, 0 * g))
    grad = gradient(shape)
    torch.testing.assert_close(sngd.precondition(state, grad), grad / 0.25)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_any_gradient_is_computed_in_the_dtype_of_the_rows(dtype):
    sngd, shape = method(), SHAPES[1]
    state = updated(sngd, shape, dtype=torch.float32)
    grad = gradient(shape).to(dtype)
    before, kept = copies(state), grad.clone()
    out = sngd.precondition(state, grad)
    assert out.dtype == torch.float32 and out.shape == grad.shape
    assert torch.equal(out, sngd.precondition(state, grad.float()))
    assert equal(state, before) and torch.equal(grad, kept)


def test_the_damping_may_follow_the_step():
    sngd, shape = method(lambda step: 1.0 / (1 + step)), SHAPES[0]
    assert sngd.at(3).damping == 0.25
    state = updated(sngd.at(3), shape)
    assert state["damping"].tolist() == [0.25]


def test_a_state_follows_its_dtype():
    sngd, shape = method(state_dtype=torch.float64), SHAPES[0]
    a, g = random_rows(shape, 6, dtype=torch.float32)
    state = run(sngd, sngd.init(shape, torch.device("cpu"), torch.float32), seen_of(sngd, a, g))
    assert {t.dtype for t in state.values() if t.is_floating_point()} == {torch.float64}
