"""Every method against the contract of `mkor.methods.base`."""

import inspect
from dataclasses import replace

import pytest
import torch

from method_cases import CASES, method_of
from method_driver import LayerShape, combined, finish, init, random_seen, run_update
from mkor.messages import Exchange, Owned, Stacked
from mkor.methods import METHODS
from mkor.methods.base import EVENTS, Method, Rows, Sums

SHAPES = [LayerShape(1, 4, 5), LayerShape(3, 2, 4)]
PARAMETERS = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
BAD = [float("nan"), float("inf"), float("-inf")]


def copies(state):
    return {key: tensor.clone() for key, tensor in state.items()}


def equal(one, two):
    return one.keys() == two.keys() and all(torch.equal(one[key], two[key]) for key in one)


def factors(state):
    """The curvature without the counters."""
    return {key: tensor for key, tensor in state.items() if tensor.is_floating_point()}


def keeps_rows(method):
    """Whether the state grows with the batch."""
    return isinstance(method.wants(SHAPES[0])[0], Rows)


def trained(method, shape, updates=3, parameters=torch.float32):
    state = init(method, shape, parameters)
    source = torch.Generator().manual_seed(3)
    dtype = torch.float64 if parameters == torch.float64 else torch.float32
    for _ in range(updates):
        seen = random_seen(method, shape, dtype=dtype, generator=source)
        again = None
        if method.second_pass:
            again = random_seen(method, shape, dtype=dtype, generator=source)
        state = run_update(method, state, seen, again)
    return state


cases = pytest.mark.parametrize("case", list(CASES))
shapes = pytest.mark.parametrize("shape", SHAPES, ids=str)


def test_every_registered_method_has_a_row():
    assert {method_of(case).name for case in CASES} == set(METHODS)
    for name, cls in METHODS.items():
        assert issubclass(cls, Method)
        assert any(type(method_of(c)) is cls and method_of(c).name == name for c in CASES)


@cases
@shapes
@pytest.mark.parametrize("parameters", PARAMETERS, ids=str)
def test_state_is_a_plain_dict_of_tensors_of_the_announced_size(case, shape, parameters):
    method = method_of(case)
    fresh = init(method, shape, parameters)
    for state in (fresh, trained(method, shape, 2, parameters)):
        assert type(state) is dict
        assert all(type(key) is str and type(t) is torch.Tensor for key, t in state.items())
        assert not any(t.requires_grad for t in state.values())
        size = sum(t.numel() * t.element_size() for t in state.values())
        if state is fresh or not keeps_rows(method):
            assert method.bytes(shape, parameters) == size
        for key, tensor in factors(state).items():
            assert tensor.dtype == method.dtype(parameters, key)
    assert fresh.keys() == state.keys()


@cases
@shapes
def test_state_tensors_do_not_share_memory(case, shape):
    """Else a checkpoint, or an update in place, would mix layers or sides."""
    state = trained(method_of(case), shape)
    stores = [tensor.untyped_storage().data_ptr() for tensor in state.values()]
    assert len(set(stores)) == len(stores)
    assert all(t.is_contiguous() for t in state.values())


@cases
def test_state_loads_with_weights_only(case, tmp_path):
    state = trained(method_of(case), SHAPES[0])
    torch.save(state, tmp_path / "state.pt")
    assert equal(torch.load(tmp_path / "state.pt", weights_only=True), state)


@cases
def test_two_layers_have_states_of_their_own(case):
    method = method_of(case)
    one, two = init(method, SHAPES[0]), init(method, SHAPES[0])
    before = copies(two)
    run_update(method, one, random_seen(method, SHAPES[0]))
    assert equal(two, before)


@cases
@shapes
def test_update_is_a_generator_of_exchanges_that_returns_the_state(case, shape):
    method = method_of(case)
    state = init(method, shape)
    generator = method.update(state, random_seen(method, shape))
    assert inspect.isgenerator(generator)
    message = next(generator)
    assert type(message) is Exchange
    tensors = combined(message).values()
    assert tensors and all(t.is_floating_point() for t in tensors)
    assert len(tensors) == len(message.sum) + len(message.mean) + len(message.gather)
    returned = finish(generator, message)
    assert type(returned) is dict and returned.keys() == state.keys()


@cases
@shapes
def test_an_update_changes_the_factors(case, shape):
    method = method_of(case)
    before = factors(init(method, shape))
    after = factors(trained(method, shape, 1))
    assert before and all(not torch.equal(before[key], after[key]) for key in before)


@cases
@shapes
def test_an_update_leaves_the_statistic_alone(case, shape):
    method = method_of(case)
    seen = random_seen(method, shape)
    kept = [seen.inputs.clone(), seen.grads.clone(), seen.rows.clone()]
    run_update(method, trained(method, shape), seen)
    assert all(map(torch.equal, kept, [seen.inputs, seen.grads, seen.rows]))


@cases
@shapes
@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("part", ["inputs", "grads", "both"])
def test_statistics_that_are_not_finite_are_left_out_and_counted(case, shape, bad, part):
    method = method_of(case)
    state = trained(method, shape)
    before = copies(state)
    seen = random_seen(method, shape)
    if part != "grads":
        seen.inputs[..., :1] = bad
    if part != "inputs":
        seen.grads[..., :1] = bad
    state = run_update(method, state, seen)
    assert all(bool(torch.isfinite(t).all()) for t in factors(state).values())
    counted = dict(zip(EVENTS, (state["events"] - before["events"]).tolist(), strict=True))
    assert counted["skipped"] >= shape.stack or not sides_hit(method, shape, part)
    grad = torch.randn(shape.stack, shape.outputs, shape.inputs)
    after = method.precondition(state, grad)
    assert torch.isfinite(after).all()
    if part == "both" and CASES[case][1].get("on_nonfinite") != "reset":
        assert torch.equal(after, method.precondition(before, grad))


def sides_hit(method, shape, part):
    """Whether a bad statistic of this part reaches a factor."""
    outputs, inputs = method.sides(shape)
    return {"inputs": inputs, "grads": outputs, "both": outputs or inputs}[part]


@cases
def test_one_bad_matrix_of_a_stack_leaves_the_others_to_their_update(case):
    method, shape = method_of(case), LayerShape(3, 2, 4)
    good, bad = trained(method, shape), trained(method, shape)
    seen = random_seen(method, shape)
    broken = replace(seen, inputs=seen.inputs.clone(), grads=seen.grads.clone())
    broken.inputs[1, 0, 0] = broken.grads[1, 0, 0] = float("nan")
    good, bad = run_update(method, good, seen), run_update(method, bad, broken)
    for key, tensor in factors(good).items():
        torch.testing.assert_close(bad[key][[0, 2]], tensor[[0, 2]], rtol=1e-2, atol=1e-2)


@cases
@shapes
def test_no_rows_change_nothing(case, shape):
    method = method_of(case)
    state = trained(method, shape)
    before = copies(state)
    assert equal(run_update(method, state, random_seen(method, shape, rows=0)), before)


@cases
def test_fewer_rows_than_blocks_are_an_update_too(case):
    method, shape = method_of(case), SHAPES[0]
    state = trained(method, shape)
    before = copies(state)
    seen = random_seen(method, shape, rows=1)
    state = run_update(method, state, seen)
    assert all(bool(torch.isfinite(t).all()) for t in factors(state).values())
    assert not equal(factors(state), factors(before))


@cases
@shapes
def test_a_bias_gradient_serves_as_the_output_side(case, shape):
    """Visible as one sum that is already averaged over workers, so it doesn't cross again."""
    method = method_of(case)
    seen = random_seen(method, shape)
    if not isinstance(method.wants(shape)[1], Sums):
        pytest.skip("wants more of the output gradients than their sum")
    seen = replace(seen, grads=seen.grads.sum(dim=1, keepdim=True), grads_reduced=True)
    generator = method.update(init(method, shape), seen)
    message = next(generator)
    crossing = combined(message).values()
    assert not any(torch.equal(t, seen.grads) for t in crossing)
    state = finish(generator, message)
    assert not equal(factors(state), factors(init(method, shape)))


def added(mine, theirs):
    """What two workers get back for their messages."""
    answers = {key: value + combined(theirs)[key] for key, value in combined(mine).items()}
    answers |= {key: answers[key] / 2 for key in mine.mean}
    return answers | {
        key: torch.cat([value, theirs.gather[key]], dim=1) for key, value in mine.gather.items()
    }


def answers_of(mine, theirs):
    """What two workers get for their messages: shared, unless each computes its own."""
    if isinstance(mine, Stacked):
        return combined(mine), combined(theirs)
    answers = mine.compute() if isinstance(mine, Owned) else added(mine, theirs)
    return answers, {key: tensor.clone() for key, tensor in answers.items()}


@cases
@shapes
def test_what_crosses_workers_decides_the_update(case, shape):
    """Workers with other rows, resumed with the same answers, agree to the last bit."""
    method = method_of(case)
    seen = random_seen(method, shape)
    here = method.update(trained(method, shape), seen)
    other = replace(
        random_seen(method, shape), true=seen.true, weight=seen.weight
    )  # the gradient is the same for all
    there = method.update(trained(method, shape), other)
    mine, theirs = next(here), next(there)
    while True:
        states = []
        for generator, answer in zip((here, there), answers_of(mine, theirs), strict=True):
            try:
                states.append(generator.send(answer))
            except StopIteration as stop:
                states.append(stop.value)
        if isinstance(states[0], dict):
            break
        mine, theirs = states
    assert equal(*states)


@cases
@shapes
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_precondition_keeps_shape_state_and_gradient(case, shape, dtype):
    method = method_of(case)
    parameters = torch.float64 if dtype == torch.float64 else torch.float32
    state = trained(method, shape, parameters=parameters)
    before = copies(state)
    grad = torch.randn(shape.stack, shape.outputs, shape.inputs).to(dtype)
    kept = grad.clone()
    first, second = method.precondition(state, grad), method.precondition(state, grad)
    assert first.shape == grad.shape and first.is_floating_point()
    if dtype != torch.bfloat16 and CASES[case][1].get("state_dtype") is None:
        assert first.dtype == dtype
    assert torch.isfinite(first).all()
    assert torch.equal(first, second)
    assert torch.equal(grad, kept) and equal(state, before)
    assert first.data_ptr() != grad.data_ptr()


@cases
@shapes
def test_precondition_is_linear(case, shape):
    method = method_of(case)
    state = trained(method, shape)
    one = torch.randn(shape.stack, shape.outputs, shape.inputs)
    two = torch.randn_like(one)
    together = method.precondition(state, 3 * one - two).float()
    apart = 3 * method.precondition(state, one).float() - method.precondition(state, two).float()
    tolerance = 5e-2 if CASES[case][1].get("state_dtype") == torch.bfloat16 else 1e-4
    torch.testing.assert_close(together, apart, rtol=0, atol=tolerance * float(apart.abs().max()))
    assert torch.equal(method.precondition(state, 0 * one), 0 * together)
    assert torch.equal(method.precondition(state, -one), -method.precondition(state, one))


@cases
@shapes
def test_a_preconditioned_gradient_still_descends(case, shape):
    """The preconditioner is positive definite: ⟨P(g), g⟩ > 0."""
    method = method_of(case)
    state = trained(method, shape, 30)
    for _ in range(5):
        grad = torch.randn(shape.stack, shape.outputs, shape.inputs)
        assert float((method.precondition(state, grad).float() * grad).sum()) > 0


DAMPED = ("kernel", "damping", "root", "vectors", "values", "inverse")
"""Parts of a state that are made anew of what is averaged, with the damping of the time."""


def averages(method, state):
    """What an update carries over to the next, without what is solved of it."""
    if method.name == "kbfgs":  # its inverses are followed, never averaged
        return {key: state[key] for key in ("moment", "weight", "s", "y") if key in state}
    return {key: t for key, t in factors(state).items() if key.split("_")[-1] not in DAMPED}


UNDAMPED = [case for case in CASES if not getattr(method_of(case), "dense", False)]
"""All but MKOR's dense rules, whose damping is the unit of the vectors, with tests in math."""


@pytest.mark.parametrize("case", UNDAMPED)
def test_damping_is_not_part_of_what_is_averaged(case):
    """Else it would add up."""
    method = method_of(case)
    little, much = (replace(method, damping=damping) for damping in (1e-3, 0.4))
    one, two = (trained(each, SHAPES[0], 4) for each in (little, much))
    kept = averages(method, one)
    assert kept and equal(kept, averages(method, two))
    grad = torch.randn(1, 4, 5)
    assert not torch.equal(little.precondition(one, grad), much.precondition(two, grad))


@cases
@shapes
def test_methods_are_deterministic(case, shape):
    method = method_of(case)
    one, two = trained(method, shape, 5), trained(method_of(case), shape, 5)
    assert equal(one, two)
    grad = torch.randn(shape.stack, shape.outputs, shape.inputs)
    assert torch.equal(method.precondition(one, grad), method.precondition(two, grad))


@cases
def test_limits_are_explained(case):
    method = method_of(case)
    assert all(isinstance(side, bool) for side in method.sides(SHAPES[0]))
    assert isinstance(method.limit(), str) and method.limit()
