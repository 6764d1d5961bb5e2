"""K-FAC against dense float64 oracles."""

import pytest
import torch

import kfac_oracles as oracle
from kfac_oracles import SHAPES, LayerShape, fresh, method, random_rows, seen_of, update
from mkor.factors import covariance
from mkor.methods.base import Moment

SPLITS = {"factored": oracle.factored, "plain": lambda A, G, damping: (damping, damping)}
shapes = pytest.mark.parametrize("shape", SHAPES, ids=str)


def assert_close(actual, expected, tolerance=1e-10):
    limit = tolerance * float(expected.abs().max())
    torch.testing.assert_close(actual, expected, rtol=0, atol=limit, check_dtype=False)


def estimate(state, side):
    """The running covariance, [G, d, d]."""
    return state[side] / state[f"{side}_weight"][:, None, None]


def history(kfac, shape, updates=4, rows=6):
    """A state after some updates, and the two oracle covariances of each matrix of the stack."""
    state, batches = fresh(kfac, shape), []
    for _ in range(updates):
        batches.append(random_rows(shape, rows))
        state = update(kfac, state, seen_of(*batches[-1]))
    pairs = [
        [
            oracle.moving_average([oracle.second_moment(b[side][g]) for b in batches], kfac.decay)
            for side in (0, 1)
        ]
        for g in range(shape.stack)
    ]
    return state, pairs


@shapes
def test_the_first_update_gives_the_plain_covariance(shape):
    kfac = method()
    inputs, own = random_rows(shape, 7)
    state = update(kfac, fresh(kfac, shape), seen_of(inputs, own))
    for g in range(shape.stack):
        assert_close(estimate(state, "inputs")[g], oracle.second_moment(inputs[g]))
        assert_close(estimate(state, "outputs")[g], oracle.second_moment(own[g]))


@shapes
@pytest.mark.parametrize("decay", [0.5, 0.9, 0.99])
def test_covariances_are_moving_averages_without_an_identity(shape, decay):
    state, pairs = history(method(decay=decay), shape)
    for g, (A, G) in enumerate(pairs):
        assert_close(estimate(state, "inputs")[g], A)
        assert_close(estimate(state, "outputs")[g], G)


def test_a_decay_that_changes_weighs_every_update_by_what_came_after():
    kfac = method(decay=lambda step: [0.5, 0.9, 0.8][step])
    state, moments = fresh(kfac, SHAPES[0]), []
    for step in range(3):
        inputs, own = random_rows(SHAPES[0], 5)
        moments.append(oracle.second_moment(inputs[0]))
        state = update(kfac.at(step), state, seen_of(inputs, own))
    weights = [0.5 * 0.9 * 0.8, 0.1 * 0.8, 0.2]
    expected = sum(w * m for w, m in zip(weights, moments, strict=True)) / sum(weights)
    assert_close(estimate(state, "inputs")[0], expected)


@shapes
@pytest.mark.parametrize("damping", [1e-4, 0.01, 1.0])
@pytest.mark.parametrize("rows", [1, 6])
def test_eigen_solves_with_the_kronecker_product(shape, damping, rows):
    kfac = method(damping=damping)
    state, pairs = history(kfac, shape, rows=rows)
    grad = torch.randn(shape.stack, shape.outputs, shape.inputs, dtype=torch.float64)
    out = kfac.precondition(state, grad)
    for g, (A, G) in enumerate(pairs):
        assert_close(out[g], oracle.kronecker_solve(A, G, grad[g], damping), 1e-9)


@shapes
@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("damping", [1e-4, 0.01, 1.0])
@pytest.mark.parametrize("rows", [1, 6])
def test_inverse_multiplies_by_the_damped_inverses(shape, split, damping, rows):
    kfac = method(solver="inverse", damping=damping, damping_split=split)
    state, pairs = history(kfac, shape, rows=rows)
    grad = torch.randn(shape.stack, shape.outputs, shape.inputs, dtype=torch.float64)
    out = kfac.precondition(state, grad)
    for g, (A, G) in enumerate(pairs):
        expected = oracle.factor_solve(A, G, grad[g], *SPLITS[split](A, G, damping))
        assert_close(out[g], expected, 1e-9)


@pytest.mark.parametrize("solver", ["eigen", "inverse"])
@pytest.mark.parametrize("alone", ["inputs", "outputs"])
def test_a_side_that_is_too_wide_counts_as_the_identity(solver, alone):
    shape = LayerShape(2, 6, 3) if alone == "inputs" else LayerShape(2, 3, 6)
    kfac = method(solver=solver, max_dim=4, damping=0.1)
    assert kfac.sides(shape) == (alone == "outputs", alone == "inputs")
    state, pairs = history(kfac, shape)
    wide = "outputs" if alone == "inputs" else "inputs"
    assert not [key for key in state if key.startswith(wide)]
    grad = torch.randn(2, shape.outputs, shape.inputs, dtype=torch.float64)
    out = kfac.precondition(state, grad)
    for g, (A, G) in enumerate(pairs):
        A = A if alone == "inputs" else torch.eye(6, dtype=torch.float64)
        G = G if alone == "outputs" else torch.eye(6, dtype=torch.float64)
        assert_close(out[g], oracle.kronecker_solve(A, G, grad[g], 0.1), 1e-9)


def test_before_the_first_update_the_factors_are_the_identity():
    grad = torch.randn(1, 4, 5, dtype=torch.float64)
    eigen, inverse = method(damping=0.25), method(solver="inverse")
    assert_close(eigen.precondition(fresh(eigen, SHAPES[0]), grad), grad / 1.25)
    assert_close(inverse.precondition(fresh(inverse, SHAPES[0]), grad), grad)


# --- rows and workers ----------------------------------------------------------------------------


def test_positions_of_a_convolution_are_rows_of_the_inputs_and_add_up_in_the_outputs():
    """A = mean over samples and positions; G = mean over samples of the sum over positions."""
    samples, positions = 3, 4
    inputs, own = random_rows(LayerShape(1, 4, 5), samples * positions)
    kfac = method()
    state = update(kfac, fresh(kfac, SHAPES[0]), seen_of(inputs, own, samples))
    assert_close(estimate(state, "inputs")[0], oracle.second_moment(inputs[0]))
    assert_close(estimate(state, "outputs")[0], positions * oracle.second_moment(own[0]))


def test_the_batch_size_does_not_change_the_covariance_of_the_outputs():
    """Four times the same rows are the same curvature, though each gradient is a quarter."""
    kfac = method()
    rows = random_rows(SHAPES[0], 3)
    once = update(kfac, fresh(kfac, SHAPES[0]), seen_of(*rows))
    repeated = [each.repeat(1, 4, 1) for each in rows]
    often = update(kfac, fresh(kfac, SHAPES[0]), seen_of(*repeated))
    for side in ("inputs", "outputs"):
        assert_close(often[side], once[side])


@shapes
@pytest.mark.parametrize("solver", ["eigen", "inverse"])
@pytest.mark.parametrize("counts", [(4, 4), (1, 7), (3, 2, 6)])
def test_workers_equal_one_on_the_union_batch(shape, solver, counts):
    kfac = method(solver=solver)
    states, alone = [fresh(kfac, shape) for _ in counts], fresh(kfac, shape)
    for _ in range(3):
        inputs, own = random_rows(shape, sum(counts))
        parts = zip(inputs.split(counts, dim=1), own.split(counts, dim=1), strict=True)
        states = oracle.run(kfac, states, [seen_of(*part) for part in parts])
        alone = update(kfac, alone, seen_of(inputs, own))
    grad = torch.randn(shape.stack, shape.outputs, shape.inputs, dtype=torch.float64)
    for state in states:
        assert all(torch.equal(state[key], states[0][key]) for key in state)
        for key in ("inputs", "outputs", "inputs_weight", "outputs_weight"):
            assert_close(state[key], alone[key])
        assert_close(kfac.precondition(state, grad), kfac.precondition(alone, grad), 1e-9)


def test_a_worker_without_rows_adds_nothing():
    kfac, shape = method(), SHAPES[1]
    rows = random_rows(shape, 5)
    none = [each[:, :0] for each in rows]
    alone = update(kfac, fresh(kfac, shape), seen_of(*rows))
    states = [fresh(kfac, shape), fresh(kfac, shape)]
    for state in oracle.run(kfac, states, [seen_of(*rows), seen_of(*none, samples=0)]):
        assert all(torch.equal(state[key], alone[key]) for key in state)


# --- the scale of the loss -----------------------------------------------------------------------


@pytest.mark.parametrize("factor", [2.0**16, 2.0**-10, 3.0])
def test_a_loss_scale_comes_out_of_the_outputs(factor):
    kfac, shape = method(), SHAPES[1]
    inputs, own = random_rows(shape, 6)
    true = torch.randn(shape.stack, shape.outputs, dtype=torch.float64)
    plain = update(kfac, fresh(kfac, shape), seen_of(inputs, own))
    scaled = seen_of(inputs, own, factor=factor, shown=factor * true, true=true)
    state = update(kfac, fresh(kfac, shape), scaled)
    for key in ("inputs", "outputs", "outputs_values"):
        assert_close(state[key], plain[key])


def test_workers_average_what_they_showed_before_it_is_compared():
    """Each worker's sums are of its own loss; the true gradient is their mean."""
    kfac, shape, factor = method(), SHAPES[0], 128.0
    rows = [random_rows(shape, 5) for _ in range(2)]
    own = [torch.randn(1, shape.outputs, dtype=torch.float64) for _ in range(2)]
    true = sum(own) / 2
    seens = [
        seen_of(*r, factor=factor, shown=factor * o, true=true)
        for r, o in zip(rows, own, strict=True)
    ]
    states = oracle.run(kfac, [fresh(kfac, shape) for _ in rows], seens)
    union = [torch.cat(parts, dim=1) for parts in zip(*rows, strict=True)]
    alone = update(kfac, fresh(kfac, shape), seen_of(*union))
    assert_close(states[0]["outputs"], alone["outputs"])


def test_what_is_asked_of_the_capture():
    assert method().absolute()
    shape = SHAPES[0]
    assert method().wants(shape) == (Moment("expand"), Moment("expand"))
    assert method(weight_sharing="reduce").wants(shape) == (Moment("reduce"), Moment("reduce"))


def test_the_matrix_of_a_wide_side_is_not_asked_for():
    narrow = method(max_dim=4)
    assert narrow.wants(LayerShape(1, 3, 9)) == (Moment("expand", False), Moment("expand", True))
    assert narrow.wants(LayerShape(1, 9, 3)) == (Moment("expand", True), Moment("expand", False))


# --- schedules -----------------------------------------------------------------------------------


@pytest.mark.parametrize("solver", ["eigen", "inverse"])
def test_damping_never_enters_the_running_covariances(solver):
    shape = SHAPES[1]
    batches = [random_rows(shape, 4) for _ in range(5)]
    states = []
    for damping in (1e-3, 10.0, lambda step: 1.0 / (step + 1)):
        kfac = method(solver=solver, damping=damping)
        state = fresh(kfac, shape)
        for step, batch in enumerate(batches):
            state = update(kfac.at(step), state, seen_of(*batch))
        states.append(state)
    for key in ("inputs", "outputs", "inputs_weight", "outputs_weight"):
        assert torch.equal(states[0][key], states[1][key])
        assert torch.equal(states[0][key], states[2][key])


def test_eigen_damps_by_the_value_of_the_step():
    kfac = method(damping=lambda step: 10.0**-step)
    state, pairs = history(kfac.at(0), SHAPES[0])
    grad = torch.randn(1, 4, 5, dtype=torch.float64)
    for step in range(3):
        expected = oracle.kronecker_solve(*pairs[0], grad[0], 10.0**-step)
        assert_close(kfac.at(step).precondition(state, grad)[0], expected, 1e-9)


def test_decompositions_are_renewed_when_they_are_due():
    kfac = method(inverse_update_steps=20, warmup_steps=3)
    due = [step for step in range(50) if kfac.at(step).refresh]
    assert due == [0, 1, 2, 20, 40]
    changing = method(inverse_update_steps=lambda step: 10 if step < 30 else 15)
    assert [step for step in range(50) if changing.at(step).refresh] == [0, 10, 20, 30, 45]


def test_a_decomposition_between_two_updates_waits_for_the_next():
    kfac = method(factor_update_steps=4, inverse_update_steps=10)
    assert [step for step in range(0, 41, 4) if kfac.at(step).refresh] == [0, 12, 20, 32, 40]


def test_the_first_update_of_a_layer_decomposes():
    assert not method(inverse_update_steps=10).at(5).refresh
    assert method(inverse_update_steps=10).at(5).first().refresh


@pytest.mark.parametrize("solver", ["eigen", "inverse"])
def test_between_two_decompositions_only_the_covariances_change(solver):
    kfac, shape = method(solver=solver, inverse_update_steps=10), SHAPES[1]
    state = update(kfac.at(0), fresh(kfac, shape), seen_of(*random_rows(shape, 4)))
    before = {key: tensor.clone() for key, tensor in state.items()}
    state = update(kfac.at(5), state, seen_of(*random_rows(shape, 4)))
    changed = {key for key in state if not torch.equal(state[key], before[key])}
    assert changed == {"inputs", "outputs", "inputs_weight", "outputs_weight"}


# --- dtypes and sizes ----------------------------------------------------------------------------


@pytest.mark.parametrize("solver", ["eigen", "inverse"])
@pytest.mark.parametrize(
    ("state_dtype", "inverse_dtype", "tolerance"),
    [
        (None, None, 1e-3),
        (None, torch.float64, 1e-3),
        (torch.float64, None, 1e-9),
        (torch.float64, torch.float32, 1e-3),
        (torch.bfloat16, None, 0.1),
        (torch.bfloat16, torch.float64, 0.1),
    ],
)
def test_dtypes_of_the_state_and_of_the_decomposition(
    solver, state_dtype, inverse_dtype, tolerance
):
    shape = LayerShape(2, 5, 6)
    kfac = method(solver=solver, state_dtype=state_dtype, inverse_dtype=inverse_dtype, damping=0.5)
    exact = method(solver=solver, damping=0.5)
    state, true = fresh(kfac, shape, torch.float32), fresh(exact, shape)
    for _ in range(30):
        rows = random_rows(shape, 8)
        true = update(exact, true, seen_of(*rows))
        state = update(kfac, state, seen_of(*(each.float() for each in rows)))
    if state_dtype == torch.float64:  # the statistics were float32
        tolerance = max(tolerance, 1e-5)
    grad = torch.randn(2, 5, 6)
    out = kfac.precondition(state, grad)
    floats = [tensor for tensor in state.values() if tensor.is_floating_point()]
    assert {tensor.dtype for tensor in floats} == {kfac.dtype(torch.float32)}
    assert out.dtype == kfac.dtype(torch.float32)
    assert all(torch.isfinite(tensor).all() for tensor in floats)
    assert_close(out.double(), exact.precondition(true, grad.double()), tolerance)


@shapes
@pytest.mark.parametrize("solver", ["eigen", "inverse"])
def test_bytes_are_those_of_the_state(shape, solver):
    for kfac in (method(solver=solver), method(solver=solver, max_dim=4)):
        size = sum(t.numel() * t.element_size() for t in fresh(kfac, shape).values())
        assert kfac.bytes(shape, torch.float64) == size


def test_an_update_writes_in_place():
    kfac, shape = method(), SHAPES[1]
    state = fresh(kfac, shape)
    places = {key: tensor.data_ptr() for key, tensor in state.items()}
    state = update(kfac, state, seen_of(*random_rows(shape, 4)))
    assert places == {key: tensor.data_ptr() for key, tensor in state.items()}
    assert all(tensor.is_contiguous() for tensor in state.values())


def test_split_damping_balances_the_factors():
    zero, one, four = (torch.full((1,), value) for value in (0.0, 1.0, 4.0))
    cases = [(one, four, 0.05, 0.2), (four, four, 0.1, 0.1)]
    cases += [(zero, one, 0.1, 0.1), (one, zero, 0.1, 0.1), (zero, zero, 0.1, 0.1)]
    for outputs, inputs, to_outputs, to_inputs in cases:
        found = covariance.split_damping(0.01, outputs, inputs)
        assert [float(each) for each in found] == pytest.approx([to_outputs, to_inputs])
    far = covariance.split_damping(0.01, torch.full((1,), 1e-30), torch.full((1,), 1e30))
    assert float(far[0] * far[1]) == pytest.approx(0.01)
