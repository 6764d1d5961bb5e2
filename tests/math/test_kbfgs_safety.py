"""K-BFGS: workers, stacks, dtypes, options, and what keeps the factors sound."""

import pytest
import torch
from torch import nn

import mkor
from method_driver import LayerShape, finish, init
from quadratic_layer import (
    BAD,
    F64,
    SHAPE,
    SIDES,
    Batch,
    completed,
    copies,
    method,
    run_first,
    run_revisit,
    seen_of,
    step,
    trained,
    weights,
)
from test_no_sync import no_sync
from workers import together


@pytest.mark.parametrize("memory", [None, 3])
def test_two_workers_equal_one(memory):
    now, batch = method(memory=memory), Batch(count=12)
    weight = weights()
    later = weight + 0.1 * weights()
    one = init(now, SHAPE, F64)
    two = [init(now, SHAPE, F64) for _ in range(2)]
    for run, at in (("update", weight), ("revisit", later)):
        one = completed(getattr(now, run)(one, batch.seen(at)))
        parts = []
        for half in (slice(0, 6), slice(6, 12)):
            # A worker's loss is the mean over its own rows.
            grads = 2 * batch.grads(at)[:, half]
            parts.append(seen_of(batch.inputs[:, half], grads, at))
        pairs = zip(two, parts, strict=True)
        two = together([getattr(now, run)(state, part) for state, part in pairs])
    for key in one:
        torch.testing.assert_close(two[0][key], one[key])
        assert torch.equal(two[0][key], two[1][key])


def test_a_bias_gradient_does_not_cross_in_either_pass():
    batch, weight = Batch(), weights()
    state = init(method(), SHAPE, F64)
    for run in ("update", "revisit"):
        generator = getattr(method(), run)(state, batch.seen(weight, reduced=True))
        message = next(generator)
        assert not message.mean
        state = finish(generator, message)


def test_the_second_pass_sends_no_moment():
    batch, weight = Batch(), weights()
    state = run_first(method(), init(method(), SHAPE, F64), batch.seen(weight))
    message = next(method().revisit(state, batch.seen(weight)))
    assert set(message.sum) == {"rows", "input_sums", "strayed"}


@pytest.mark.parametrize("memory", [None, 3])
def test_a_stack_is_its_matrices_one_by_one(memory):
    now = method(memory=memory)
    batches, steps = [Batch() for _ in range(4)], [0.1 * weights() for _ in range(4)]
    start = weights()

    def run(part):
        state, weight = init(now, LayerShape(len(start[part]), 3, 4), F64), start[part]
        for number, (batch, move) in enumerate(zip(batches, steps, strict=True)):
            current = method(starting=number == 0, memory=memory)
            for visit, at in ((run_first, weight), (run_revisit, weight + move[part])):
                seen = seen_of(batch.inputs[part], batch.grads(at, part), at)
                state = visit(current, state, seen)
            weight = weight + move[part]
        return state

    whole = run(slice(0, 2))
    for g in range(2):
        alone = run(slice(g, g + 1))
        for key in set(whole) - {"events"}:
            torch.testing.assert_close(whole[key][g], alone[key][0])


@pytest.mark.parametrize("on_nonfinite", ["skip", "reset"])
@pytest.mark.parametrize("memory", [None, 3])
def test_no_rows_change_nothing(on_nonfinite, memory):
    options = {"on_nonfinite": on_nonfinite, "memory": memory}
    state = trained(**options)
    empty = seen_of(torch.zeros(2, 0, 4, dtype=F64), torch.zeros(2, 0, 3, dtype=F64), weights())
    for starting in (True, False):
        now, before = method(starting, **options), copies(state)
        for run in (run_first, run_revisit):
            state = run(now, state, empty)
            assert all(torch.equal(state[key], before[key]) for key in before)


def test_no_rows_yet_leave_the_factors_as_they_start():
    empty = seen_of(torch.zeros(2, 0, 4, dtype=F64), torch.zeros(2, 0, 3, dtype=F64), weights())
    for starting in (True, False):
        state, fresh = (init(method(), SHAPE, F64) for _ in range(2))
        for run in (run_first, run_revisit):
            state = run(method(starting), state, empty)
        assert all(torch.equal(state[key], fresh[key]) for key in fresh)


@pytest.mark.parametrize("starting", [True, False])
@pytest.mark.parametrize("options", [{}, {"memory": 3}, {"on_nonfinite": "reset"}], ids=str)
def test_neither_pass_waits_for_the_device(options, starting):
    now, state, batch, weight = method(starting, **options), trained(**options), Batch(), weights()
    more = {"shown": torch.randn(2, 3, dtype=F64), "true": torch.randn(2, 3, dtype=F64)}
    first, second = batch.seen(weight, **more), batch.seen(weight + 0.1, **more)
    gradient = torch.randn(2, 3, 4, dtype=F64)
    with no_sync():
        state = run_revisit(now, run_first(now, state, first), second)
        now.precondition(state, gradient)


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("side", ["inputs", "outputs"])
@pytest.mark.parametrize("starting", [True, False])
def test_what_is_not_finite_is_left_out_and_counted_by_matrix(bad, side, starting):
    state, now = trained(), method(starting)
    before, events = copies(state), state["events"].clone()
    batch, weight = Batch(), weights()
    inputs, grads = batch.inputs.clone(), batch.grads(weight)
    (inputs if side == "inputs" else grads)[1, 0, 0] = bad
    state = run_first(now, state, seen_of(inputs, grads, weight))
    assert int(state["events"][0] - events[0]) == 1
    for key in SIDES[side]:
        assert torch.equal(state[key][1], before[key][1])
    for name, keys in SIDES.items():
        for key in keys:
            # Without its inputs a matrix has no mean output either.
            still = side == "inputs" and name == "outputs"
            assert not torch.equal(state[key][0], before[key][0])
            assert name == side or still or not torch.equal(state[key][1], before[key][1])
    assert state["pending"].tolist() == [True, False]
    assert all(bool(torch.isfinite(t).all()) for t in state.values())


@pytest.mark.parametrize("memory", [None, 3])
@pytest.mark.parametrize("bad", BAD)
def test_a_second_pass_that_is_not_finite_is_left_out(bad, memory):
    state, now = trained(memory=memory), method(memory=memory)
    batch, weight = Batch(), weights()
    state = run_first(now, state, batch.seen(weight))
    before = copies(state)
    grads = batch.grads(weight + 0.1)
    grads[0, 0, 1] = bad
    state = run_revisit(now, state, seen_of(batch.inputs, grads, weight + 0.1))
    assert int(state["events"][0] - before["events"][0]) == 1
    for key in ("s", "y", "outputs" if memory is None else "steps"):
        assert torch.equal(state[key][0], before[key][0])
        assert not torch.equal(state[key][1], before[key][1])


def test_a_first_pass_that_was_not_finite_makes_no_pair():
    state, batch, weight = trained(), Batch(), weights()
    grads = batch.grads(weight)
    grads[1, 0, 0] = float("nan")
    state = run_first(method(), state, seen_of(batch.inputs, grads, weight))
    before = copies(state)
    state = run_revisit(method(), state, batch.seen(weight + 0.1))
    assert torch.equal(state["outputs"][1], before["outputs"][1])
    assert not torch.equal(state["outputs"][0], before["outputs"][0])
    assert int(state["events"][0] - before["events"][0]) == 0


@pytest.mark.parametrize("memory", [None, 3])
def test_reset_makes_the_side_as_it_was_at_the_start(memory):
    options = {"on_nonfinite": "reset", "memory": memory}
    now, fresh = method(False, **options), init(method(**options), SHAPE, F64)
    keys = ("outputs",) if memory is None else ("steps", "changes")
    state, batch, weight = trained(**options), Batch(), weights()
    inputs, grads = batch.inputs.clone(), batch.grads(weight)
    inputs[1, 0, 0] = grads[0, 0, 0] = float("nan")
    state = run_first(now, state, seen_of(inputs, grads, weight))
    for key, g in [
        *((key, 1) for key in SIDES["inputs"]),
        *((key, 0) for key in (*keys, "s", "y")),
    ]:
        assert torch.equal(state[key][g], fresh[key][g])
        assert not torch.equal(state[key][1 - g], fresh[key][1 - g])
    assert state["events"].tolist()[:2] == [2, 2]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("memory", [None, 3])
def test_half_precision_factors_stay_sound(dtype, memory):
    state = trained(30, dtype=torch.float32, state_dtype=dtype, memory=memory)
    now = method(state_dtype=dtype, memory=memory)
    for key, tensor in state.items():
        if tensor.is_floating_point():
            exact = key in {"weight", "mean_outputs", "mean_grads", "s", "y"}
            assert tensor.dtype == (torch.float32 if exact else dtype)
            assert tensor.dtype == now.dtype(torch.float32, key)
            assert torch.isfinite(tensor).all()
    gradient = torch.randn(2, 3, 4)
    assert ((now.precondition(state, gradient) * gradient).sum(dim=(-2, -1)) > 0).all()


@pytest.mark.parametrize("scale", [1e-12, 1e-4, 1e4, 1e12])
def test_inputs_and_losses_of_any_size_leave_finite_factors(scale):
    shape = LayerShape(1, 3, 4)
    for inputs_size, loss_size in ((scale, 1.0), (1.0, scale), (scale, scale)):
        state, weight = init(method(), shape), weights(shape, torch.float32)
        for number in range(20):
            batch = Batch(shape, hessian=loss_size * torch.eye(3)[None], dtype=torch.float32)
            batch.inputs *= inputs_size
            state, weight = step(method(number == 0), state, batch, weight)
        assert all(bool(torch.isfinite(t).all()) for t in state.values())
        assert (state["outputs"].diagonal(dim1=-2, dim2=-1) > 0).all()
        assert (state["inputs"].diagonal(dim1=-2, dim2=-1) > 0).all()


def test_the_options_of_a_step():
    scheduled = method(start_steps=3, damping=lambda step: 0.5 / (1 + step))
    now = [scheduled.at(step) for step in (0, 2, 3)]
    assert [m.starting for m in now] == [True, True, False]
    assert [m.damping for m in now] == [0.5, 0.5 / 3, 0.125]
    assert not method(start_steps=0).at(0).starting
    assert now[2].first().starting
    assert scheduled.second_pass and scheduled.absolute()


@pytest.mark.parametrize("options", [{}, {"memory": 5}, {"max_dim": 3}, {"max_dim": 2}])
@pytest.mark.parametrize("dtype", [torch.float32, F64, torch.bfloat16])
def test_bytes_are_those_of_the_state(options, dtype):
    for state_dtype in (None, torch.bfloat16):
        now = method(state_dtype=state_dtype, **options)
        state = init(now, SHAPE, dtype)
        size = sum(t.numel() * t.element_size() for t in state.values())
        assert now.bytes(SHAPE, dtype) == size


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("factor_decay", 1.0),
        ("pair_decay", 1.0),
        ("pair_decay", lambda step: 0.9),
        ("damping", 1.0),
        ("damping", 0.0),
        ("memory", 0),
        ("max_dim", 0),
        ("state_dtype", torch.int8),
    ],
)
def test_options_out_of_range_are_named(option, value):
    model = nn.Linear(2, 2)
    base = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match=option):
        mkor.KBFGS(model, base, **{option: value})
