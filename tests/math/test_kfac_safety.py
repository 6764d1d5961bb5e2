"""K-FAC where something is wrong: statistics that aren't finite, and decompositions that fail."""

import pytest
import torch

from kfac_oracles import LayerShape, fresh, method, random_rows, seen_of, update
from method_driver import happened
from mkor.factors import covariance
from mkor.methods.base import EVENTS

SHAPE = LayerShape(3, 3, 4)
SOLVERS = ["eigen", "inverse"]
solvers = pytest.mark.parametrize("solver", SOLVERS)


def trained(kfac, shape=SHAPE, parameters=torch.float64, updates=3):
    state = fresh(kfac, shape, parameters)
    for _ in range(updates):
        state = update(kfac, state, seen_of(*random_rows(shape, 6, parameters)))
    return state


def copies(state):
    return {key: tensor.clone() for key, tensor in state.items()}


def side_of(state, side):
    return {key: t for key, t in state.items() if key.split("_")[0] == side}


def counted(state, event):
    return int(state["events"][EVENTS.index(event)])


def finite(state):
    return all(bool(torch.isfinite(t).all()) for t in state.values() if t.is_floating_point())


# --- statistics ----------------------------------------------------------------------------------


@solvers
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize(("field", "side"), [("inputs", "inputs"), ("grads", "outputs")])
def test_a_statistic_that_is_not_finite_is_left_out_of_its_matrix(solver, bad, field, side):
    kfac = method(solver=solver)
    state = trained(kfac)
    before = copies(state)
    seen = seen_of(*random_rows(SHAPE, 6))
    # What a bad entry in a row leaves of the sum of outer products.
    getattr(seen, field)[1, 0, :] = getattr(seen, field)[1, :, 0] = bad
    state = update(kfac, state, seen)
    for key, tensor in side_of(state, side).items():
        assert torch.equal(tensor[1], before[key][1])
        assert not any(torch.equal(tensor[g], before[key][g]) for g in (0, 2))
    other = "outputs" if side == "inputs" else "inputs"
    assert not torch.equal(state[other][1], before[other][1])
    assert happened(state) == {"skipped": 1}
    assert finite(state)


@solvers
def test_reset_starts_the_average_of_that_matrix_anew(solver):
    kfac = method(solver=solver, on_nonfinite="reset")
    state, start = trained(kfac), fresh(kfac, SHAPE)
    seen = seen_of(*random_rows(SHAPE, 6))
    seen.inputs[1, 0, 0] = float("inf")
    state = update(kfac, state, seen)
    for key, tensor in side_of(state, "inputs").items():
        assert torch.equal(tensor[1], start[key][1])
        assert not torch.equal(tensor[0], start[key][0])
    assert happened(state) == {"skipped": 1, "resets": 1}
    rows = random_rows(SHAPE, 6)
    state = update(kfac, state, seen_of(*rows))
    expected = rows[0][1].T @ rows[0][1] / 6
    torch.testing.assert_close(state["inputs"][1] / state["inputs_weight"][1], expected)


@solvers
@pytest.mark.parametrize("updates", [0, 3])
@pytest.mark.parametrize("on_nonfinite", ["skip", "reset"])
def test_no_rows_change_nothing(solver, updates, on_nonfinite):
    kfac = method(solver=solver, on_nonfinite=on_nonfinite)
    state = trained(kfac, updates=updates)
    before = copies(state)
    none = [each[:, :0] for each in random_rows(SHAPE, 6)]
    state = update(kfac, state, seen_of(*none, samples=0))
    assert all(torch.equal(state[key], before[key]) for key in before)


@solvers
def test_zero_statistics_leave_the_damping_alone(solver):
    """V = ∇/λ; with a covariance of zero there is no π to split it by."""
    kfac = method(solver=solver, damping=0.25)
    zero = [torch.zeros_like(each) for each in random_rows(SHAPE, 6)]
    state = update(kfac, fresh(kfac, SHAPE), seen_of(*zero))
    grad = torch.randn(3, 3, 4, dtype=torch.float64)
    torch.testing.assert_close(kfac.precondition(state, grad), grad / 0.25)
    assert torch.equal(kfac.precondition(state, 0 * grad), 0 * grad)
    assert not state["events"].any()


@solvers
@pytest.mark.parametrize("split", ["factored", "plain"])
@pytest.mark.parametrize("scale", [1e-30, 1e-18, 1e17, 1e30])
def test_tiny_and_huge_rows_in_float32_stay_defined(solver, split, scale):
    """Squares that overflow are left out; those that underflow count as zero."""
    kfac = method(solver=solver, damping_split=split)
    state = fresh(kfac, SHAPE, torch.float32)
    for _ in range(3):
        inputs, own = random_rows(SHAPE, 6, torch.float32)
        state = update(kfac, state, seen_of(scale * inputs, scale * own))
    assert finite(state)
    assert finite({"out": kfac.precondition(state, torch.randn(3, 3, 4))})
    assert counted(state, "skipped") == (18 if scale == 1e30 else 0)
    assert counted(state, "rejected") == 0


def test_a_gain_that_overflows_is_caught_before_the_average():
    kfac = method()
    state = trained(kfac, parameters=torch.float32)
    before = copies(state)
    seen = seen_of(*random_rows(SHAPE, 6, torch.float32))
    seen.grads[:] = 1e30
    ones = torch.ones(3, 3)
    object.__setattr__(seen, "shown", ones)
    object.__setattr__(seen, "true", 1e6 * ones)
    state = update(kfac, state, seen)
    assert torch.equal(state["outputs"], before["outputs"])
    assert counted(state, "skipped") == 3


def mean_of(state, side):
    """The mean eigenvalue of a running covariance, [G]."""
    return covariance.mean_eigenvalue(state[side], state[f"{side}_weight"], torch.float64)


@solvers
@pytest.mark.parametrize("scale", [1e3, 1e6, 1e9])
@pytest.mark.parametrize("side", ["inputs", "outputs"])
def test_a_huge_batch_adds_ten_times_the_damped_average_at_most(solver, scale, side):
    kfac = method(solver=solver, decay=0.95)
    state = trained(kfac)
    before = {each: mean_of(state, each) for each in ("inputs", "outputs")}
    mass = state[f"{side}_weight"].clone()
    grad = torch.randn(3, 3, 4, dtype=torch.float64)
    usual = kfac.precondition(state, grad).norm(dim=(1, 2))
    inputs, own = random_rows(SHAPE, 6)
    (inputs if side == "inputs" else own)[1] *= scale
    state = update(kfac, state, seen_of(inputs, own))
    after, level = mean_of(state, side), 0.01**0.5
    grown = 0.95 * mass[1] * before[side][1] + 10 * (before[side][1] + level)
    torch.testing.assert_close(after[1], grown / (0.95 * mass[1] + 0.05))
    assert bool((after[[0, 2]] < 3 * before[side][[0, 2]]).all())
    assert happened(state) == {"bounded": 1}
    # Unbounded, a step would be `scale` squared times shorter.
    assert bool((kfac.precondition(state, grad).norm(dim=(1, 2)) > usual / 1000).all())


@solvers
def test_a_lasting_change_of_scale_is_followed(solver):
    kfac = method(solver=solver, decay=0.95)
    state = trained(kfac)
    inputs, own = random_rows(SHAPE, 6)
    for _ in range(60):
        state = update(kfac, state, seen_of(1e6 * inputs, own))
    wanted = 1e12 * inputs.square().sum(dim=(1, 2)) / (6 * 4)
    assert bool((mean_of(state, "inputs") > 0.9 * wanted).all())
    assert 3 * 3 <= happened(state)["bounded"] <= 3 * 12


def test_nothing_bounds_the_first_batch():
    kfac = method()
    inputs, own = random_rows(SHAPE, 6)
    state = update(kfac, fresh(kfac, SHAPE), seen_of(1e6 * inputs, 1e6 * own))
    assert not happened(state)
    expected = 1e12 * inputs.square().sum(dim=(1, 2)) / (6 * 4)
    torch.testing.assert_close(mean_of(state, "inputs"), expected)


# --- decompositions ------------------------------------------------------------------------------


@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16, torch.float64])
@solvers
@pytest.mark.parametrize("scale", [1e-4, 1.0, 1e4])
def test_one_constant_row_of_512_inputs(solver, scale, state_dtype):
    """A factor of rank one, update after update."""
    shape = LayerShape(1, 4, 512)
    kfac = method(solver=solver, state_dtype=state_dtype, damping=1e-3, decay=0.95)
    state = fresh(kfac, shape, torch.float32)
    for _ in range(4):
        own = torch.randn(1, 1, 4)
        state = update(kfac, state, seen_of(scale * torch.ones(1, 1, 512), own))
    grad = torch.randn(1, 4, 512)
    out = kfac.precondition(state, grad).float()
    assert finite(state) and finite({"out": out})
    assert counted(state, "rejected") == 0
    assert float((out * grad).sum()) > 0


def failing_eigh(times, monkeypatch):
    """Make the first calls of eigh fail; the dtypes and matrices of all calls."""
    calls, genuine = [], torch.linalg.eigh

    def eigh(matrix, *args, **kwargs):
        calls.append(matrix.clone())
        if len(calls) <= times:
            raise torch.linalg.LinAlgError("did not converge")
        return genuine(matrix, *args, **kwargs)

    monkeypatch.setattr(torch.linalg, "eigh", eigh)
    return calls


def test_eigh_that_fails_is_tried_again_in_float64(monkeypatch):
    kfac, rows = method(), random_rows(SHAPE, 6, torch.float32)
    expected = update(kfac, fresh(kfac, SHAPE, torch.float32), seen_of(*rows))
    calls = failing_eigh(1, monkeypatch)
    state = update(kfac, fresh(kfac, SHAPE, torch.float32), seen_of(*rows))
    # The outputs as a stack, each of its matrices alone, then the inputs as a stack.
    assert [call.dtype for call in calls] == [torch.float32, *[torch.float64] * 3, torch.float32]
    grad = torch.randn(3, 3, 4)
    out, wanted = kfac.precondition(state, grad), kfac.precondition(expected, grad)
    torch.testing.assert_close(out, wanted, rtol=1e-3, atol=1e-3 * float(wanted.abs().max()))
    assert counted(state, "rejected") == 0


def test_eigh_that_fails_twice_keeps_the_last_and_is_counted(monkeypatch):
    kfac = method()
    state = trained(kfac)
    before = copies(state)
    failing_eigh(3, monkeypatch)  # the stack of outputs, then the first two of its matrices
    state = update(kfac, state, seen_of(*random_rows(SHAPE, 6)))
    assert counted(state, "rejected") == 2
    for key in ("outputs_vectors", "outputs_values"):
        for g in range(3):
            assert torch.equal(state[key][g], before[key][g]) is (g < 2)
    assert not torch.equal(state["outputs"][0], before["outputs"][0])
    assert not torch.equal(state["inputs_values"][0], before["inputs_values"][0])
    assert finite(state)


def test_the_jitter_is_as_small_as_rounding(monkeypatch):
    matrix = torch.eye(8)[None].repeat(2, 1, 1)
    calls = failing_eigh(1, monkeypatch)
    values, vectors = covariance.decompose(matrix)
    assert float((calls[1] - torch.eye(8)).abs().max()) <= 2e-7
    torch.testing.assert_close(vectors @ torch.diag_embed(values) @ vectors.mT, matrix)


def test_an_indefinite_covariance_keeps_the_last_inverse_and_is_counted():
    kfac = method(solver="inverse")
    state = trained(kfac)
    state["inputs"][1].diagonal().sub_(100)
    before = copies(state)
    state = update(kfac, state, seen_of(*random_rows(SHAPE, 6)))
    assert torch.equal(state["inputs_inverse"][1], before["inputs_inverse"][1])
    for g in (0, 2):
        assert not torch.equal(state["inputs_inverse"][g], before["inputs_inverse"][g])
    assert counted(state, "rejected") == 1
    assert finite(state)


def test_negative_eigenvalues_count_as_zero():
    kfac = method()
    state = trained(kfac)
    state["inputs"][1].diagonal().sub_(100)
    state = update(kfac, state, seen_of(*random_rows(SHAPE, 6)))
    assert bool((state["inputs_values"] >= 0).all())
    assert torch.equal(state["inputs_values"][1], torch.zeros(4, dtype=torch.float64))


@pytest.mark.parametrize("side", [16, 128, 384])
@pytest.mark.parametrize("rank", [1, 5])
@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16])
def test_rounding_never_makes_an_inverse_fail(side, rank, state_dtype):
    """However large a covariance of low rank is against its damping."""
    kfac = method(solver="inverse", damping=1e-12, damping_split="plain", state_dtype=state_dtype)
    shape = LayerShape(2, 2, side)
    state = fresh(kfac, shape, torch.float32)
    for _ in range(3):
        inputs = torch.randn(2, rank, side) + 3
        state = update(kfac, state, seen_of(100 * inputs, torch.randn(2, rank, 2)))
    assert counted(state, "rejected") == 0
    assert finite(state)


def test_a_pivot_below_the_damping_is_rounding_and_gets_more_of_it():
    """Else -0.99λ + λ passes for positive, and its inverse is a hundred times what λ allows."""
    matrix = torch.diag(torch.tensor([1.0, -0.99e-6])).repeat(2, 1, 1).double()
    matrix[1, 1, 1] = 0
    damping, floor = (torch.full((2,), size).double() for size in (1e-6, 1e-5))
    root, failed = covariance.damped_root(matrix, damping, floor)
    assert not failed.any()
    assert root[:, 1, 1].square().tolist() == pytest.approx([1.001e-5, 1e-6], rel=1e-3)


def test_a_pivot_of_zero_fails_and_leaves_the_rest_of_the_stack():
    total = torch.diag_embed(torch.tensor([[-1.0, 0.0], [1.0, 0.0]]))
    inverse, sound = covariance.inverse(total, torch.ones(2), 1.0, torch.float64)
    assert sound.tolist() == [False, True]
    torch.testing.assert_close(inverse[1].diagonal().tolist(), [0.5, 1.0])


def test_a_second_preconditioning_is_the_same_and_changes_nothing():
    for solver in SOLVERS:
        kfac = method(solver=solver)
        state = trained(kfac)
        before = copies(state)
        grad = torch.randn(3, 3, 4, dtype=torch.float64)
        kept = grad.clone()
        assert torch.equal(kfac.precondition(state, grad), kfac.precondition(state, grad))
        assert torch.equal(grad, kept)
        assert all(torch.equal(state[key], before[key]) for key in before)


def test_a_reading_of_values_is_left_to_eigh():
    """Torch checks on the host whether eigh converged; nothing else waits for the device."""
    from test_no_sync import no_sync

    for solver in SOLVERS:
        for on_nonfinite in ("skip", "reset"):
            kfac = method(solver=solver, on_nonfinite=on_nonfinite)
            state = fresh(kfac, SHAPE)
            ones = torch.ones(3, 3, dtype=torch.float64)
            seen = seen_of(*random_rows(SHAPE, 6), shown=ones, true=2 * ones)
            grad = torch.randn(3, 3, 4, dtype=torch.float64)
            with no_sync():
                kfac.precondition(update(kfac.at(0), state, seen), grad)
