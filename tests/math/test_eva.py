"""Eva against the explicit inverse, its averages by hand, and what keeps them finite."""

import pytest
import torch
from torch import nn

import mkor
from method_driver import LayerShape, Seen, init, run_update
from mkor.methods.base import EVENTS
from mkor.methods.eva import EvaMethod
from test_no_sync import no_sync
from workers import together

SHAPE = LayerShape(2, 3, 4)
F64 = torch.float64
BAD = [float("nan"), float("inf"), float("-inf")]


def method(decay=0.95, damping=0.03, state_dtype=None, on_nonfinite="skip"):
    return EvaMethod(decay, damping, state_dtype, on_nonfinite)


def rows_of(shape=SHAPE, count=6, dtype=F64):
    """The input rows [G, n, i] and, for a mean loss, the gradients autograd leaves, [G, n, o]."""
    inputs = torch.randn(shape.stack, count, shape.inputs, dtype=dtype)
    grads = torch.randn(shape.stack, count, shape.outputs, dtype=dtype) / count
    return inputs, grads


def seen_of(inputs, grads, reduced=False, **more):
    rows = torch.tensor([float(inputs.shape[1])], dtype=inputs.dtype)
    sums = (part.sum(dim=1, keepdim=True) for part in (inputs, grads))
    return Seen(*sums, rows, torch.zeros(()), grads_reduced=reduced, **more)


def explicit(mean_input, mean_grad, grad, damping):
    """(λI + vvᵀ)⁻¹ vec ∇W with v = ḡ ⊗ ā, of one matrix."""
    v = torch.outer(mean_grad, mean_input).flatten()
    curvature = torch.outer(v, v) + damping * torch.eye(len(v), dtype=v.dtype)
    return torch.linalg.solve(curvature, grad.flatten()).view_as(grad)


def after(*batches, **options):
    state = init(method(**options), SHAPE, F64)
    for batch in batches:
        state = run_update(method(**options), state, seen_of(*batch))
    return state


@pytest.mark.parametrize("damping", [1e-4, 0.03, 10.0])
@pytest.mark.parametrize("size", [1e-3, 1.0, 30.0])
def test_it_is_the_inverse_of_the_damped_outer_product(damping, size):
    inputs, grads = rows_of()
    inputs, grads = size * inputs, size * grads
    state = after((inputs, grads), damping=damping)
    gradient = torch.randn(2, 3, 4, dtype=F64)
    out = method(damping=damping).precondition(state, gradient)
    for g in range(2):
        expected = explicit(inputs[g].mean(0), grads[g].sum(0), gradient[g], damping)
        # The explicit system has a condition of up to 1e10.
        torch.testing.assert_close(out[g], expected, rtol=0, atol=1e-6 * expected.abs().max())


def test_the_averages_by_hand():
    decay, batches = 0.8, [rows_of() for _ in range(5)]
    state = after(*batches, decay=decay)
    inputs = outputs = torch.zeros(2, 1, dtype=F64)
    weight = 0.0
    for seen_inputs, seen_grads in batches:
        inputs = decay * inputs + (1 - decay) * seen_inputs.mean(dim=1)
        outputs = decay * outputs + (1 - decay) * seen_grads.sum(dim=1)
        weight = decay * weight + (1 - decay)
    torch.testing.assert_close(state["inputs"], inputs)
    torch.testing.assert_close(state["outputs"], outputs)
    torch.testing.assert_close(state["weight"], torch.full((2,), 1 - decay**5, dtype=F64))
    gradient = torch.randn(2, 3, 4, dtype=F64)
    out = method(decay).precondition(state, gradient)
    for g in range(2):
        expected = explicit(inputs[g] / weight, outputs[g] / weight, gradient[g], 0.03)
        torch.testing.assert_close(out[g], expected, rtol=1e-9, atol=1e-12)


def test_the_weight_is_on_the_old_value_and_the_first_update_is_the_vector_itself():
    first, second = rows_of(), rows_of()
    state = after(first)
    torch.testing.assert_close(state["inputs"] / state["weight"][:, None], first[0].mean(dim=1))
    state = after(first, second)
    mean = (0.95 * first[0].mean(dim=1) + second[0].mean(dim=1)) / 1.95
    torch.testing.assert_close(state["inputs"] / state["weight"][:, None], mean)


def test_damping_is_not_stored():
    batch = rows_of()
    kept = after(batch, damping=0.03)
    assert all(torch.equal(kept[key], value) for key, value in after(batch, damping=9.0).items())


def test_zero_statistics_leave_the_gradient_over_damping():
    gradient = torch.randn(2, 3, 4, dtype=F64)
    zero = torch.zeros(2, 6, 4, dtype=F64), torch.zeros(2, 6, 3, dtype=F64)
    one_zero = torch.ones(2, 6, 4, dtype=F64), torch.zeros(2, 6, 3, dtype=F64)
    for state in (init(method(), SHAPE, F64), after(zero), after(one_zero)):
        out = method().precondition(state, gradient)
        torch.testing.assert_close(out, gradient / 0.03, rtol=1e-15, atol=0)


def test_a_mean_gradient_of_rounding_noise_does_not_matter():
    inputs, grads = rows_of()
    gradient = torch.randn(2, 3, 4, dtype=F64)
    out = method().precondition(after((inputs, 1e-7 * grads)), gradient)
    torch.testing.assert_close(out, gradient / 0.03, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("inputs_size", [1e-35, 1e-20, 1.0, 1e20, 1e37])
@pytest.mark.parametrize("grads_size", [1e-35, 1e-20, 1.0, 1e20, 1e37])
def test_no_product_overflows_in_float32(inputs_size, grads_size):
    """‖ā‖²‖ḡ‖² leaves the range of float32 in most of these."""
    inputs, grads = rows_of(dtype=torch.float32)
    batch = inputs_size * inputs, grads_size * grads
    state = init(method(), SHAPE)
    state = run_update(method(), state, seen_of(*batch))
    gradient = torch.randn(2, 3, 4)
    out = method().precondition(state, gradient)
    for g in range(2):
        mean_input, mean_grad = batch[0][g].double().mean(0), batch[1][g].double().sum(0)
        p, q = (torch.linalg.vector_norm(v) for v in (mean_input, mean_grad))
        share = 1 / (1 + 0.03 / (p * q) ** 2)
        unit = torch.outer(mean_grad / q, mean_input / p)
        expected = (gradient[g] - share * (unit * gradient[g]).sum() * unit) / 0.03
        torch.testing.assert_close(out[g].double(), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("side", [0, 1])
def test_what_is_not_finite_is_left_out_and_counted_by_matrix(bad, side):
    state = after(rows_of())
    before = {key: tensor.clone() for key, tensor in state.items()}
    batch = rows_of()
    batch[side][1, 0, 0] = bad
    state = run_update(method(), state, seen_of(*batch))
    assert state["events"].tolist() == [1] + [0] * (len(EVENTS) - 1)
    for key in ("inputs", "outputs", "weight"):
        assert torch.equal(state[key][1], before[key][1])
        assert not torch.equal(state[key][0], before[key][0])


def test_reset_forgets_the_matrix():
    state, batch = after(rows_of()), rows_of()
    batch[0][1, 0, 0] = float("nan")
    state = run_update(method(on_nonfinite="reset"), state, seen_of(*batch))
    assert state["events"].tolist() == [1, 1] + [0] * (len(EVENTS) - 2)
    assert all(bool((state[key][1] == 0).all()) for key in ("inputs", "outputs", "weight"))
    assert all(bool((state[key][0] != 0).all()) for key in ("inputs", "outputs", "weight"))


@pytest.mark.parametrize("on_nonfinite", ["skip", "reset"])
@pytest.mark.parametrize("reduced", [True, False])
def test_no_rows_change_nothing(reduced, on_nonfinite):
    state = after(rows_of())
    before = {key: tensor.clone() for key, tensor in state.items()}
    empty = seen_of(torch.zeros(2, 0, 4, dtype=F64), torch.zeros(2, 0, 3, dtype=F64), reduced)
    state = run_update(method(on_nonfinite=on_nonfinite), state, empty)
    assert all(torch.equal(state[key], before[key]) for key in before)


def test_a_bias_gradient_does_not_cross():
    generator = method().update(init(method(), SHAPE, F64), seen_of(*rows_of(), reduced=True))
    message = next(generator)
    assert set(message.sum) == {"inputs", "rows"} and not message.mean


@pytest.mark.parametrize("scale", [1.0, 65536.0, 0.25])
def test_a_loss_scale_comes_out(scale):
    inputs, grads = rows_of()
    true = torch.randn(2, 3, dtype=F64)
    scaled = seen_of(inputs, scale * grads, shown=scale * true, true=true)
    state = run_update(method(), init(method(), SHAPE, F64), scaled)
    torch.testing.assert_close(state["outputs"], after((inputs, grads))["outputs"])


@pytest.mark.parametrize("sizes", [(6, 6), (2, 10), (12, 0)])
def test_two_workers_equal_one(sizes):
    """Each worker's loss is the mean over its own rows, and their gradients are averaged."""
    shape, count = SHAPE, sum(sizes)
    inputs = torch.randn(shape.stack, count, shape.inputs, dtype=F64)
    own = torch.randn(shape.stack, count, shape.outputs, dtype=F64)
    parts, weights = [], torch.zeros(count, dtype=F64)
    for start, size in ((0, sizes[0]), (sizes[0], sizes[1])):
        rows = slice(start, start + size)
        weights[rows] = 1 / (2 * max(size, 1))
        parts.append(seen_of(inputs[:, rows], own[:, rows] / max(size, 1)))
    whole = run_update(
        method(), init(method(), shape, F64), seen_of(inputs, own * weights[:, None])
    )
    results = together([method().update(init(method(), shape, F64), part) for part in parts])
    for key in whole:
        torch.testing.assert_close(results[0][key], whole[key])
        assert torch.equal(results[0][key], results[1][key])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_state_comes_close(dtype):
    batches = [rows_of() for _ in range(20)]
    state = init(method(state_dtype=dtype), SHAPE)
    for inputs, grads in batches:
        seen = seen_of(inputs.float(), grads.float())
        state = run_update(method(state_dtype=dtype), state, seen)
    assert {state[key].dtype for key in ("inputs", "outputs", "weight")} == {dtype}
    gradient = torch.randn(2, 3, 4)
    out = method(state_dtype=dtype).precondition(state, gradient)
    expected = method().precondition(after(*batches), gradient.double())
    assert out.dtype == torch.float32
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=0.1 * expected.abs().max())


def test_a_stack_is_its_matrices_one_by_one():
    batches = [rows_of() for _ in range(3)]
    state, gradient = after(*batches), torch.randn(2, 3, 4, dtype=F64)
    together_out = method().precondition(state, gradient)
    for g in range(2):
        alone = init(method(), LayerShape(1, 3, 4), F64)
        for inputs, grads in batches:
            alone = run_update(method(), alone, seen_of(inputs[g : g + 1], grads[g : g + 1]))
        out = method().precondition(alone, gradient[g : g + 1])
        torch.testing.assert_close(out[0], together_out[g])


@pytest.mark.parametrize("on_nonfinite", ["skip", "reset"])
def test_nothing_waits_for_the_device(on_nonfinite):
    now, state = method(on_nonfinite=on_nonfinite), after(rows_of())
    more = {"shown": torch.randn(2, 3, dtype=F64), "true": torch.randn(2, 3, dtype=F64)}
    seen, gradient = seen_of(*rows_of(), **more), torch.randn(2, 3, 4, dtype=F64)
    with no_sync():
        now.precondition(run_update(now, state, seen), gradient)


def test_schedules_are_resolved_at_a_step():
    now = method(decay=lambda step: 0.5 + step / 10, damping=lambda step: 1.0 + step).at(3)
    assert (now.decay, now.damping) == (0.8, 4.0)
    assert now.absolute() and now.sides(SHAPE) == (True, True)


def test_bytes_are_those_of_the_state():
    for dtype in (torch.float32, F64, torch.bfloat16):
        state = init(method(), SHAPE, dtype)
        size = sum(t.numel() * t.element_size() for t in state.values())
        assert method().bytes(SHAPE, dtype) == size


@pytest.mark.parametrize(
    ("option", "value"),
    [("factor_decay", 1.0), ("damping", 0.0), ("damping", None), ("state_dtype", torch.int8)],
)
def test_options_out_of_range_are_named(option, value):
    model = nn.Linear(2, 2)
    base = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match=option):
        mkor.Eva(model, base, **{option: value})
