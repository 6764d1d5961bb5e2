"""What keeps a factor finite and positive definite: guard, stabiliser, normalisation, counters."""

import pytest
import torch

import dense_oracles as oracle
from mkor.factors import dense

RULES = list(dense.RULES)
HALF = [torch.float16, torch.bfloat16]
LIMITS = {"exact": 100.0, "paper": 100.0, "reference": 2.0}


def start(side, stack=1, dtype=torch.float64):
    return dense.identity(stack, side, dtype, torch.device("cpu"))


def propose(rule, inverse, vectors, decay=0.9, blend=0.95):
    return dense.RULES[rule](inverse, dense.prepare(vectors, None), decay, LIMITS[rule], blend)


def all_usable(inverse):
    return torch.ones(len(inverse), dtype=torch.bool)


def guarded_by_default(inverse, change):
    return dense.guard(change, all_usable(inverse), inverse.dtype)


def normalise(vectors, damping):
    """The vectors that a prepared statistic stands for."""
    seen = dense.prepare(vectors, damping)
    return seen.units / seen.floor**0.5


def spread_inverse(side, stack, dtype=torch.float64):
    """Positive definite matrices with known largest entry 1."""
    root = torch.randn(stack, side, side, dtype=torch.float64)
    spd = root @ root.mT + torch.eye(side, dtype=torch.float64)
    return (spd / spd.abs().amax(dim=(-2, -1), keepdim=True)).to(dtype)


# --- guard ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, *HALF])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf"), 1.0])
@pytest.mark.parametrize("rule", RULES)
def test_a_statistic_that_is_not_usable_leaves_the_factor_bit_equal(rule, bad, dtype):
    inverse = spread_inverse(5, 3, dtype)
    before = inverse.clone()
    vectors = torch.randn(3, 5, 2, dtype=torch.float64 if dtype == torch.float64 else torch.float32)
    vectors[1, 2, 0] = bad
    usable = torch.tensor([True, False, True])
    change, reset = dense.guard(propose(rule, inverse, vectors), usable, inverse.dtype)
    dense.write_(inverse, change)
    assert torch.equal(inverse[1], before[1])
    assert not reset.any() and not change.blended[1]
    assert not torch.equal(inverse[0], before[0])
    assert not torch.equal(inverse[2], before[2])


def diagonal_of(inverse):
    return inverse.diagonal(dim1=-2, dim2=-1).clone()


def made_of(diagonal, column, keep=1.0, shift=0.0, sign=-1.0):
    """A change by hand of one 2x2 factor with the given diagonal."""
    inverse = torch.diag(torch.tensor(diagonal, dtype=torch.float64))[None]
    one = torch.ones(1, dtype=torch.float64)
    columns = torch.tensor(column, dtype=torch.float64)[None, :, None]
    no = torch.zeros(1, dtype=torch.bool)
    return inverse, dense.Change(diagonal_of(inverse), keep * one, shift * one, columns, sign, no)


@pytest.mark.parametrize(
    ("diagonal", "column", "sign"),
    [
        ([1.0, 1.0], [1.0, 0.0], -1.0),  # a zero on the diagonal
        ([1.0, 1.0], [0.0, 1.5], -1.0),  # a negative one
        ([1.0, 1.0], [float("nan"), 0.0], -1.0),
        ([1.0, 1.0], [0.0, float("inf")], 1.0),
        ([1.0, 1.0], [1e200, 0.0], 1.0),  # beyond the dtype's range
    ],
)
def test_an_unsound_result_becomes_the_identity_and_is_counted(diagonal, column, sign):
    inverse, change = made_of(diagonal, column, sign=sign)
    change, reset = guarded_by_default(inverse, change)
    dense.write_(inverse, change)
    assert reset.tolist() == [True]
    assert change.blended.tolist() == [False]
    assert torch.equal(inverse[0], torch.eye(2, dtype=torch.float64))


def test_a_sound_result_passes_the_guard():
    inverse, change = made_of([2.0, 1.0], [0.5, 0.5], keep=2.0, shift=0.25)
    guarded, reset = guarded_by_default(inverse, change)
    dense.write_(inverse, guarded)
    assert reset.tolist() == [False]
    expected = torch.tensor([[4.0, -0.25], [-0.25, 2.0]], dtype=torch.float64)
    torch.testing.assert_close(inverse[0], expected, rtol=1e-15, atol=0)


# --- normalisation -------------------------------------------------------------------------------


@pytest.mark.parametrize("damping", [1e-3, 0.1, 10.0])
@pytest.mark.parametrize("scale", [1e-200, 1e-6, 1.0, 1e6, 1e200])
def test_normalised_vectors_have_trace_one_over_damping(scale, damping):
    vectors = scale * torch.randn(2, 7, 3, dtype=torch.float64)
    out = normalise(vectors, damping)
    for g in range(2):
        trace = sum(float(column @ column) for column in out[g].T)
        assert trace == pytest.approx(1 / damping, rel=1e-12)
        # Only the scale changes: directions and relative lengths are kept.
        ratio = out[g] / vectors[g]
        torch.testing.assert_close(ratio, ratio[:1, :1].expand_as(ratio), rtol=1e-12, atol=0)
        assert float(ratio[0, 0]) > 0


def test_normalised_zero_vectors_stay_zero():
    assert torch.equal(normalise(torch.zeros(2, 3, 2), 0.1), torch.zeros(2, 3, 2))


def test_normalising_keeps_float32_from_overflow_and_underflow():
    for scale in (1e-38, 1e-30, 1e30, 1e38):
        out = normalise(torch.full((1, 4, 1), scale), 0.1)
        torch.testing.assert_close(out, torch.full((1, 4, 1), (10 / 4) ** 0.5))


# --- long runs -----------------------------------------------------------------------------------

SIDE = 6
SCENARIOS = [
    "random",
    "one direction never excited",
    "one direction only",
    "zero",
    "tiny",
    "huge",
    "sizes that jump",
]


def scenario_vectors(step, r):
    """The vectors of all scenarios in one step, a stack [G, SIDE, r]."""
    out = torch.randn(len(SCENARIOS), SIDE, r)
    out[1, 0] = 0
    out[2] = 0
    out[2, 1] = 1
    out[3] = 0
    out[4] *= 1e-30
    out[5] *= 1e30
    out[6] *= 10.0 ** (step % 61 - 30)
    return out


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("rule", RULES)
def test_half_precision_factors_stay_finite_over_long_runs(rule, dtype):
    count = len(SCENARIOS)
    inverse = start(SIDE, 2 * count, dtype)  # raw vectors, then normalised ones
    resets = torch.zeros(2 * count, dtype=torch.int64)
    blends = torch.zeros(2 * count, dtype=torch.int64)
    finite, positive = torch.tensor(True), torch.tensor(True)
    for step in range(3000):
        raw = scenario_vectors(step, 1)
        vectors = torch.cat([raw, normalise(raw, 0.1)])
        change = propose(rule, inverse, vectors)
        change, reset = guarded_by_default(inverse, change)
        dense.write_(inverse, change)
        # Huge raw vectors leave nothing along them but rounding; normalised ones keep the damping.
        positive &= (inverse[count:].diagonal(dim1=-2, dim2=-1) > 0).all()
        finite &= torch.isfinite(inverse).all()
        resets += reset
        blends += change.blended
    assert bool(finite) and bool(positive)
    if rule == "reference":  # bounded by itself
        assert (blends == 0).all()
        assert (resets == 0).all()
    else:
        stuck = [SCENARIOS.index(name) for name in ("one direction only", "zero", "tiny")]
        assert ((blends + resets)[stuck] > 0).all()


@pytest.mark.parametrize("blend", [0.0, 0.5, 0.95, 0.999])
@pytest.mark.parametrize("decay", [0.5, 0.9, 0.99])
def test_the_stabiliser_holds_the_norm_whatever_decay_and_blend(decay, blend):
    """Directions that no vector excites grow by 1/γ an update, more than a ζ above γ takes back."""
    limit = 100.0
    inverse = start(6, dtype=torch.float32)
    for _ in range(500):
        vectors = torch.randn(1, 6, 1) + 1.0
        vectors[:, :2] = 0
        vectors = normalise(vectors, 0.1)
        change = dense.exact(inverse, dense.prepare(vectors, None), decay, limit, blend)
        change, reset = guarded_by_default(inverse, change)
        dense.write_(inverse, change)
        assert not reset
        assert float(inverse.abs().max()) <= (limit + 1) / decay * (1 + 1e-5)


def test_paper_overflows_without_help_and_is_kept_finite_with_it():
    v = torch.zeros(1, 4, 1)
    v[0, 0] = 2.0
    expected = torch.eye(4, dtype=torch.float64)
    for _ in range(400):
        expected, _ = oracle.paper(expected, v[0].double(), 0.9)
    assert not float(expected.abs().max()) < 3e38
    inverse = start(4, dtype=torch.float32)
    blends = resets = 0
    for _ in range(400):
        change = propose("paper", inverse, v)
        change, reset = guarded_by_default(inverse, change)
        dense.write_(inverse, change)
        blends += int(change.blended)
        resets += int(reset)
    assert torch.isfinite(inverse).all()
    assert blends > 0


@pytest.mark.parametrize("r", [1, 2])
@pytest.mark.parametrize(
    ("rule", "keep", "gain"),
    [("exact", 1 / 0.9, -1 / 0.9), ("paper", 0.9, 0.9**-3), ("reference", 1.0, -1.0)],
)
def test_vectors_too_large_to_square_still_act_along_their_direction(rule, keep, gain, r):
    """vᵀJv overflows float32 here, though the limit that the update tends to doesn't."""
    v = torch.zeros(1, 3, r)
    v[0, :, 0] = torch.tensor([3e30, 4e30, 0.0])
    inverse = start(3, dtype=torch.float32)
    change, _ = guarded_by_default(inverse, propose(rule, inverse, v))
    dense.write_(inverse, change)
    unit = torch.tensor([0.6, 0.8, 0.0])
    expected = keep * torch.eye(3) + gain * torch.outer(unit, unit)
    if rule == "paper" and r == 2:  # once more for the zero vector
        expected *= 0.9
    torch.testing.assert_close(inverse[0], expected, rtol=1e-5, atol=1e-6)
