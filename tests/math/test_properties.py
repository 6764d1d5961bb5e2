"""What must hold after any sequence of updates."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from method_driver import LayerShape, Seen, init, run_update
from mkor.methods.mkor import MKORMethod
from mkor.rescale import match_norm, rescaled

LIMITS = {"exact": 100.0, "paper": 100.0, "reference": 2.0}
RULES = st.sampled_from(sorted(LIMITS))
KINDS = ("random", "same", "axis", "zero", "few rows")


def method(rule="exact", vectors=1, damping=0.1, decay=0.9, blend=0.95, **options):
    usual = {"max_dim": 64, "state_dtype": None, "on_nonfinite": "skip"}
    return MKORMethod(
        rule=rule,
        vectors=vectors,
        decay=decay,
        damping=damping,
        norm_limit=LIMITS[rule],
        blend=blend,
        **{**usual, **options},
    )


@st.composite
def histories(draw, stack=2, most=25):
    """A seed, and for each update the kind and size of its vectors."""
    kinds = draw(st.lists(st.sampled_from(KINDS), min_size=1, max_size=most))
    sizes = [10.0 ** draw(st.integers(-3, 3)) for _ in kinds]
    return (
        LayerShape(stack, 3, 4),
        draw(st.integers(0, 2**20)),
        list(zip(kinds, sizes, strict=True)),
    )


def statistics(history, vectors, dtype=torch.float64, scale=1.0):
    """The statistics of a history; `scale` multiplies the gradients, as a loss scale does."""
    shape, seed, steps = history
    source = torch.Generator().manual_seed(seed)

    def draw(side):
        return torch.randn(shape.stack, vectors, side, dtype=torch.float64, generator=source)

    same = draw(shape.inputs), draw(shape.outputs)
    for kind, size in steps:
        inputs, grads = draw(shape.inputs), draw(shape.outputs)
        rows = torch.full((vectors,), 3.0, dtype=torch.float64)
        if kind == "same":
            inputs, grads = same
        elif kind == "axis":
            inputs, grads = torch.zeros_like(inputs), torch.zeros_like(grads)
            inputs[..., 0], grads[..., -1] = 1, 1
        elif kind == "zero":
            inputs, grads = torch.zeros_like(inputs), torch.zeros_like(grads)
        elif kind == "few rows":
            rows[1:] = 0
            inputs, grads = inputs * (rows > 0)[:, None], grads * (rows > 0)[:, None]
        seen = (size * inputs, scale * size * grads, rows)
        yield Seen(*(tensor.to(dtype) for tensor in seen), torch.zeros(()), grads_reduced=False)


def after(mkor, history, dtype=torch.float64, scale=1.0):
    state = init(mkor, history[0], dtype)
    for seen in statistics(history, mkor.vectors, dtype, scale):
        state = run_update(mkor, state, seen)
    return state


@settings(max_examples=40)
@given(
    histories(),
    RULES,
    st.sampled_from([1, 3]),
    st.sampled_from([None, 0.01, 1.0]),
    st.sampled_from([0.5, 0.9, 0.99]),
    st.sampled_from([0.5, 0.95]),
)
def test_factors_are_symmetric_and_positive_definite(history, rule, vectors, damping, decay, blend):
    state = after(method(rule, vectors, damping, decay, blend), history)
    for side in ("inputs", "outputs"):
        factor = state[side]
        size = factor.abs().amax(dim=(-2, -1))
        assert torch.isfinite(factor).all()
        assert bool(((factor - factor.mT).abs().amax(dim=(-2, -1)) <= 1e-13 * size).all())
        least = torch.linalg.eigvalsh((factor + factor.mT) / 2)[:, 0]
        # Raw vectors of size 1e3 take seven digits of the sixteen.
        assert bool((least > -1e-15 * size).all()) if damping is None else bool((least > 0).all())


@settings(max_examples=25)
@given(histories(), RULES, st.sampled_from([1, 3]), st.integers(-6, 6))
def test_with_damping_the_scale_of_the_loss_changes_nothing(history, rule, vectors, power):
    scale = 10.0**power
    mkor = method(rule, vectors)
    plain, scaled = after(mkor, history), after(mkor, history, scale=scale)
    for side in ("inputs", "outputs"):
        torch.testing.assert_close(scaled[side], plain[side], rtol=1e-8, atol=1e-10)
    grad = torch.randn(2, 3, 4, dtype=torch.float64)
    out, larger = mkor.precondition(plain, grad), mkor.precondition(scaled, scale * grad)
    torch.testing.assert_close(larger / scale, out, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("scale", [2.0**-20, 2.0**20])
@pytest.mark.parametrize("rule", sorted(LIMITS))
def test_a_loss_scale_that_is_a_power_of_two_is_bit_exact_in_float32(rule, scale):
    history = LayerShape(2, 3, 4), 5, [("random", 1.0)] * 20
    mkor = method(rule)
    plain = after(mkor, history, torch.float32)
    scaled = after(mkor, history, torch.float32, scale)
    assert all(torch.equal(plain[key], scaled[key]) for key in plain)


@settings(max_examples=15)
@given(histories(), RULES, st.sampled_from([torch.float32, torch.bfloat16, None]))
def test_preconditioning_changes_nothing_in_the_state(history, rule, state_dtype):
    mkor = method(rule, state_dtype=state_dtype)
    state = after(mkor, history, torch.float32)
    before = {key: tensor.clone() for key, tensor in state.items()}
    grad = torch.randn(2, 3, 4)
    kept = grad.clone()
    first, second = mkor.precondition(state, grad), mkor.precondition(state, grad)
    assert torch.equal(first, second) and torch.equal(grad, kept)
    assert before.keys() == state.keys()
    assert all(torch.equal(before[key], state[key]) for key in state)


@settings(max_examples=15)
@given(histories(), RULES)
def test_zero_gradients_stay_zero(history, rule):
    mkor = method(rule)
    zero = torch.zeros(2, 3, 4, dtype=torch.float64)
    out = mkor.precondition(after(mkor, history), zero)
    assert torch.equal(out, zero)
    assert torch.equal(rescaled(out, zero, match_norm, (3, 4)), zero)


@settings(max_examples=15)
@given(histories(stack=3), RULES, st.sampled_from([1, 3]))
def test_a_stack_is_each_of_its_matrices_alone(history, rule, vectors):
    mkor = method(rule, vectors)
    together = after(mkor, history)
    grad = torch.randn(3, 3, 4, dtype=torch.float64)
    out = mkor.precondition(together, grad)
    for g in range(3):
        state = init(mkor, LayerShape(1, 3, 4), torch.float64)
        for seen in statistics(history, vectors):
            inputs, grads = seen.inputs[g : g + 1], seen.grads[g : g + 1]
            state = run_update(
                mkor, state, Seen(inputs, grads, seen.rows, torch.zeros(()), grads_reduced=False)
            )
        for side in ("inputs", "outputs"):
            torch.testing.assert_close(together[side][g], state[side][0], rtol=1e-9, atol=1e-11)
        alone = mkor.precondition(state, grad[g : g + 1])
        torch.testing.assert_close(out[g], alone[0], rtol=1e-8, atol=1e-10)


@settings(max_examples=15)
@given(histories(), RULES)
def test_an_update_depends_on_the_statistic_alone(history, rule):
    """The same history twice gives the same bits."""
    mkor = method(rule, 2)
    first, second = after(mkor, history), after(mkor, history)
    assert all(torch.equal(first[key], second[key]) for key in first)
