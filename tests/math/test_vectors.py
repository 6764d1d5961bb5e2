"""The statistic: from sums of rows to the vectors of an update, and a whole update, explicitly."""

import pytest
import torch

import dense_oracles as oracle
from method_driver import LayerShape, Seen, init, run_update
from mkor.methods.mkor import MKORMethod
from mkor.methods.statistics import gradient_vectors, input_vectors


def blocks(rows, lengths):
    """Sums of contiguous blocks of [G, n, d] rows, [G, r, d]."""
    return torch.stack([part.sum(dim=1) for part in rows.split(lengths, dim=1)], dim=1)


@pytest.mark.parametrize("lengths", [[6], [3, 3], [4, 1, 1], [2, 2, 2, 0]])
def test_input_vectors_are_weighted_block_means(lengths):
    rows = torch.randn(2, 6, 5, dtype=torch.float64)
    counts = torch.tensor(lengths, dtype=torch.float64)
    out = input_vectors(blocks(rows, lengths), counts)
    assert out.shape == (2, 5, len(lengths))
    for g in range(2):
        moment = torch.zeros(5, 5, dtype=torch.float64)
        for j, part in enumerate(rows[g].split(lengths)):
            if lengths[j]:
                mean = part.mean(dim=0)
                torch.testing.assert_close(out[g, :, j], (lengths[j] / 6) ** 0.5 * mean)
                moment += lengths[j] / 6 * torch.outer(mean, mean)
            else:
                assert (out[g, :, j] == 0).all()
        torch.testing.assert_close(out[g] @ out[g].T, moment)


def test_one_block_gives_the_mean_row():
    rows = torch.randn(1, 7, 4, dtype=torch.float64)
    out = input_vectors(rows.sum(dim=1, keepdim=True), torch.tensor([7.0], dtype=torch.float64))
    torch.testing.assert_close(out[0, :, 0], rows[0].mean(dim=0))


@pytest.mark.parametrize("lengths", [[6], [3, 3], [4, 1, 1], [2, 2, 2, 0]])
def test_gradient_vectors_are_weighted_block_means_of_per_row_gradients(lengths):
    """Rows of a mean loss carry 1/n, so a row's own gradient is n times what autograd leaves."""
    own = torch.randn(2, 6, 5, dtype=torch.float64)
    counts = torch.tensor(lengths, dtype=torch.float64)
    out = gradient_vectors(blocks(own / 6, lengths), counts)
    for g in range(2):
        for j, part in enumerate(own[g].split(lengths)):
            expected = (lengths[j] / 6) ** 0.5 * part.mean(dim=0) if lengths[j] else 0 * own[g, 0]
            torch.testing.assert_close(out[g, :, j], expected)


def test_a_bias_gradient_is_the_mean_per_row_gradient_whatever_the_blocks():
    sums = torch.randn(3, 1, 5, dtype=torch.float64)
    out = gradient_vectors(sums, torch.tensor([2.0, 3.0], dtype=torch.float64))
    assert torch.equal(out, sums.mT)


def test_no_rows_give_zero_vectors():
    rows = torch.zeros(2)
    assert torch.equal(input_vectors(torch.zeros(1, 2, 3), rows), torch.zeros(1, 3, 2))
    assert torch.equal(gradient_vectors(torch.zeros(1, 2, 3), rows), torch.zeros(1, 3, 2))


def method(**options):
    usual = {
        "rule": "exact",
        "vectors": 1,
        "decay": 0.8,
        "damping": None,
        "norm_limit": 1e30,
        "blend": 0.95,
        "max_dim": 100,
        "state_dtype": None,
        "on_nonfinite": "skip",
    }
    return MKORMethod(**{**usual, **options})


@pytest.mark.parametrize("damping", [None, 0.3])
@pytest.mark.parametrize("lengths", [[8], [3, 3, 2]])
@pytest.mark.parametrize("rule", ["exact", "paper", "reference"])
def test_updates_follow_the_rows_and_a_step_is_the_sandwich(rule, lengths, damping):
    """Rows → mean vectors → inverses → J_g ∇W J_a, against the same by hand."""
    r, stack, outputs, inputs = len(lengths), 2, 4, 5
    limit = 2.0 if rule == "reference" else 1e30
    mkor = method(rule=rule, vectors=r, damping=damping, norm_limit=limit)
    state = init(mkor, LayerShape(stack, outputs, inputs), torch.float64)
    hand = {
        "inputs": [torch.eye(inputs, dtype=torch.float64) for _ in range(stack)],
        "outputs": [torch.eye(outputs, dtype=torch.float64) for _ in range(stack)],
    }
    for _ in range(12):
        rows = {
            "inputs": 0.3 + torch.randn(stack, 8, inputs, dtype=torch.float64),
            "outputs": 0.3 + torch.randn(stack, 8, outputs, dtype=torch.float64),
        }
        counts = torch.tensor(lengths, dtype=torch.float64)
        sums, grads = blocks(rows["inputs"], lengths), blocks(rows["outputs"] / 8, lengths)
        state = run_update(
            mkor, state, Seen(sums, grads, counts, torch.zeros(()), grads_reduced=False)
        )
        for side, matrices in hand.items():
            for g in range(stack):
                parts = rows[side][g].split(lengths)
                columns = [(len(part) / 8) ** 0.5 * part.mean(dim=0) for part in parts]
                vectors = torch.stack(columns, dim=1)
                if damping is not None:  # the trace of VVᵀ becomes 1/μ
                    vectors = vectors / (damping * (vectors @ vectors.T).trace()) ** 0.5
                if rule == "reference":
                    matrices[g], _ = oracle.reference(matrices[g], vectors, 0.95)
                else:
                    matrices[g], _ = getattr(oracle, rule)(matrices[g], vectors, 0.8)
    grad = torch.randn(stack, outputs, inputs, dtype=torch.float64)
    out = mkor.precondition(state, grad)
    for g in range(stack):
        for side in hand:
            torch.testing.assert_close(state[side][g], hand[side][g], rtol=1e-9, atol=1e-12)
        expected = hand["outputs"][g] @ grad[g] @ hand["inputs"][g]
        torch.testing.assert_close(out[g], expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("narrow", ["inputs", "outputs"])
def test_a_side_without_factor_is_left_alone(narrow):
    sizes = {"inputs": (9, 4), "outputs": (4, 9)}[narrow]
    mkor = method(max_dim=5)
    shape = LayerShape(1, *sizes)
    state = init(mkor, shape, torch.float64)
    other = "outputs" if narrow == "inputs" else "inputs"
    assert narrow in state and other not in state
    sums = torch.randn(1, 1, sizes[1], dtype=torch.float64)
    grads = torch.randn(1, 1, sizes[0], dtype=torch.float64)
    seen = Seen(
        sums, grads, torch.ones(1, dtype=torch.float64), torch.zeros(()), grads_reduced=False
    )
    state = run_update(mkor, state, seen)
    grad = torch.randn(1, *sizes, dtype=torch.float64)
    factor = state[narrow][0]
    expected = grad[0] @ factor if narrow == "inputs" else factor @ grad[0]
    torch.testing.assert_close(mkor.precondition(state, grad)[0], expected)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_reset_mode_gives_identities_where_the_statistic_is_bad_and_only_there(bad):
    shape = LayerShape(3, 4, 5)
    mkor = method(on_nonfinite="reset", damping=0.1)
    state = init(mkor, shape)
    rows = torch.tensor([2.0])
    for broken in (False, True):
        inputs, grads = torch.randn(3, 1, 5), torch.randn(3, 1, 4)
        if broken:
            inputs[1, 0, 2] = bad
        state = run_update(
            mkor, state, Seen(inputs, grads, rows, torch.zeros(()), grads_reduced=False)
        )
    is_identity = [torch.equal(state["inputs"][g], torch.eye(5)) for g in range(3)]
    assert is_identity == [False, True, False]
    assert not any(torch.equal(state["outputs"][g], torch.eye(4)) for g in range(3))
    assert state["events"][:2].tolist() == [1, 1]  # skipped, resets
