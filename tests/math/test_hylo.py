"""HyLo's two ways of picking rows, against the dense natural gradient of all rows."""

import math
from dataclasses import replace

import pytest
import torch

from mkor.factors import interpolative, rows
from mkor.methods.base import LayerShape
from mkor.methods.hylo import HyLoMethod, changes_fast
from row_driver import (
    copies,
    equal,
    estimate,
    events,
    fisher,
    natural,
    per_row_gradients,
    random_rows,
    run,
    run_workers,
    seen_of,
    start,
)

SHAPES = [LayerShape(1, 4, 5), LayerShape(3, 2, 4)]
WAYS = ["kis", "kid"]
BAD = [float("nan"), float("inf"), float("-inf")]
ways = pytest.mark.parametrize("way", WAYS)


def method(way, rank=0.25, damping=0.3, on_nonfinite="skip"):
    return HyLoMethod(damping, None, on_nonfinite, rank=rank, sampling=way)


def gradient(shape, seed=9):
    source = torch.Generator().manual_seed(seed)
    size = (shape.stack, shape.outputs, shape.inputs)
    return torch.randn(size, generator=source, dtype=torch.float64)


def updated(hylo, shape, n=12, seed=0):
    return run(hylo, start(hylo, shape), seen_of(hylo, *random_rows(shape, n, seed)))


# --- full rank -----------------------------------------------------------------------------------


@ways
@pytest.mark.parametrize("rank", [1.0, 0.999])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("calls", [1, 3])
def test_with_all_rows_it_is_the_dense_natural_gradient(calls, shape, rank, way):
    hylo = method(way, rank, damping=0.01)
    a, g = random_rows(shape, 12)
    state = run(hylo, start(hylo, shape), seen_of(hylo, a, g, calls))
    grad = gradient(shape)
    expected = natural(fisher(a, g), 0.01, grad)
    torch.testing.assert_close(hylo.precondition(state, grad), expected, rtol=1e-9, atol=1e-12)


def test_kid_needs_no_more_rows_than_the_rank_of_the_kernel():
    """48 rows that are three, over and over in other sizes; 12 are kept."""
    shape, hylo = SHAPES[1], method("kid")
    a, g = (side.repeat(1, 16, 1) for side in random_rows(shape, 3))
    g = g * torch.linspace(0.5, 2, 48, dtype=torch.float64)[:, None]
    state = run(hylo, start(hylo, shape), seen_of(hylo, a, g))
    assert state["inputs"].shape[1] == 12
    grad = gradient(shape)
    expected = natural(fisher(a, g), 0.3, grad)
    torch.testing.assert_close(hylo.precondition(state, grad), expected, rtol=1e-9, atol=1e-12)


# --- what is kept --------------------------------------------------------------------------------


@ways
@pytest.mark.parametrize(
    ("n", "rank", "kept"),
    [(1, 0.1, 1), (10, 0.1, 1), (11, 0.1, 2), (10, 0.7, 7), (30, 0.1, 3), (0, 0.1, 0), (5, 1, 5)],
)
def test_the_rank_is_the_fraction_of_rows_kept_rounded_up(n, rank, kept, way):
    assert rows.share(n, rank) == kept
    shape = SHAPES[1]
    a, g = random_rows(shape, max(n, 1))
    seen = seen_of(method(way, rank), a[:, :n], g[:, :n]) if n else None
    if seen is not None:
        assert seen.inputs.shape == (3, kept, 4) and seen.grads.shape == (3, kept, 2)


@ways
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_what_is_picked_are_rows_of_each_matrix(way, dtype):
    shape = SHAPES[1]
    a, g = (side.to(dtype) for side in random_rows(shape, 40))
    before = a.clone(), g.clone()
    out = method(way).wants(SHAPES[0])[0].compress(a, g, 3)
    assert torch.equal(a, before[0]) and torch.equal(g, before[1])
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    assert {t.dtype for t in out.values()} == {wide}
    for s in range(3):
        for left, right in zip(out["inputs"][s], out["grads"][s], strict=True):
            j = (a[s].to(wide) == left).all(dim=-1).nonzero()
            assert len(j) == 1
            ratio = right / g[s, j[0, 0]].to(wide)  # KIS weights them
            torch.testing.assert_close(ratio, ratio[:1].expand_as(ratio), rtol=1e-5, atol=0)
            assert way == "kis" or ratio[0] == 1


def test_kid_keeps_the_rows_that_the_others_need():
    """Pivots by hand: the row with most left over after a projection on those before."""
    shape, (a, g) = SHAPES[0], random_rows(SHAPES[0], 12)
    out = method("kid", 0.5).wants(SHAPES[0])[0].compress(a, g, 0)
    u = per_row_gradients(a, g)[0]
    left, expected = u.clone(), []
    for _ in range(6):
        expected.append(int(left.norm(dim=1).argmax()))
        basis = torch.linalg.qr(u[expected].T).Q
        left = u - (u @ basis) @ basis.T
    assert torch.equal(out["inputs"], a[:, expected]) and torch.equal(out["grads"], g[:, expected])
    assert shape.stack == 1


@pytest.mark.parametrize("n", [12, 64])
@pytest.mark.parametrize("rank", [0.1, 0.5])
def test_kid_writes_all_rows_in_those_it_keeps(n, rank):
    """F ≈ U_s PᵀP U_sᵀ, where the rows of P are the least squares coefficients."""
    shape, hylo = SHAPES[1], method("kid", rank)
    a, g = random_rows(shape, n)
    state = run(hylo, start(hylo, shape), seen_of(hylo, a, g))
    found = estimate(state)
    for s in range(shape.stack):
        u = per_row_gradients(a, g)[s] / n**0.5
        kept = per_row_gradients(state["inputs"], state["outputs"])[s]
        weights = torch.linalg.lstsq(kept.T, u.T).solution.T
        if len(kept) >= kept.shape[1]:
            weights = u @ torch.linalg.pinv(kept)
        expected = kept.T @ weights.T @ weights @ kept
        torch.testing.assert_close(found[s], expected, rtol=1e-6, atol=1e-8)


def test_kid_cuts_many_rows_into_chunks(monkeypatch):
    """Each with its own decomposition; the kernel of the rows kept still is a whole one."""
    monkeypatch.setattr(interpolative, "CHUNK", 16)
    shape, hylo = SHAPES[1], method("kid", 0.25)
    a, g = random_rows(shape, 42)  # chunks of 14
    seen = seen_of(hylo, a, g)
    assert seen.inputs.shape[1] == 3 * 4 and seen.kept["prior"].shape == (3, 12, 4)
    assert seen.kept["first"].tolist() == 3 * [[1, 0, 0, 0, 1, 0, 0, 0, 1, 0, 0, 0]]
    state = run(hylo, start(hylo, shape), seen)
    parts = [seen_of(hylo, *p) for p in zip(a.split(14, 1), g.split(14, 1), strict=True)]
    states = run_workers(hylo, [start(hylo, shape) for _ in parts], parts)
    for key in ("inputs", "outputs", "kernel"):
        torch.testing.assert_close(state[key], states[0][key], rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("widths", [[3, 1, 3], [2], [3, 2], [1, 1, 1]])
def test_blocks_come_back_from_their_band(widths):
    matrices = [torch.randn(2, w, w) for w in widths]
    pad = torch.nn.functional.pad
    band = torch.cat([pad(m, (0, 3 - m.shape[-1])) for m in matrices], dim=1)
    first = torch.cat([(torch.arange(w) == 0).float().expand(2, -1) for w in widths], dim=1)
    expected = torch.stack([torch.block_diag(*(m[s] for m in matrices)) for s in range(2)])
    assert torch.equal(interpolative.blocks(band, first), expected)


# --- KIS -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("rank", [0.1, 0.5])
def test_kis_is_unbiased(rank):
    """The mean of the estimates of F over many draws is F; and so is that of one micro-batch."""
    shape, draws = SHAPES[1], 4000
    a, g = random_rows(shape, 10)
    g = g * torch.linspace(0.1, 3, 10, dtype=torch.float64)[:, None]
    pick = method("kis", rank).wants(SHAPES[0])[0].compress
    total = torch.zeros(3, 8, 8, dtype=torch.float64)
    for seed in range(draws):
        out = pick(a, g, seed)
        u = per_row_gradients_fast(out["inputs"], out["grads"])
        total += u.mT @ u / 10
    exact = fisher(a, g)
    error = (total / draws - exact).flatten(1).norm(dim=1) / exact.flatten(1).norm(dim=1)
    assert (error < 6 / math.sqrt(draws * rank * 10)).all()


def per_row_gradients_fast(a, g):
    return torch.einsum("gno,gni->gnoi", g, a).flatten(2)


def test_kis_draws_by_size_and_never_a_row_of_zeros():
    shape = LayerShape(1, 3, 4)
    a, g = random_rows(shape, 8)
    a[..., -1] = torch.arange(8)  # tells which row it was
    g[:, ::2] = 0
    pick = method("kis", 0.5).wants(SHAPES[0])[0].compress
    counts = torch.zeros(8, dtype=torch.float64)
    for seed in range(2000):
        index = pick(a, g, seed)["inputs"][0, :, -1].long()
        counts += torch.bincount(index, minlength=8)
    size = (a[0].norm(dim=1) * g[0].norm(dim=1)).square()
    torch.testing.assert_close(counts / counts.sum(), size / size.sum(), rtol=0, atol=0.02)
    assert (counts[::2] == 0).all()


def test_draws_follow_their_seed_and_nothing_else():
    pick = method("kis").wants(SHAPES[0])[0].compress
    a, g = random_rows(SHAPES[1], 40)
    torch.manual_seed(0)
    before = torch.random.get_rng_state()
    one, two, three = pick(a, g, 1), pick(a, g, 1), pick(a, g, 2)
    assert torch.equal(torch.random.get_rng_state(), before)
    assert equal(one, two) and not torch.equal(one["inputs"], three["inputs"])
    assert not torch.equal(one["inputs"][0, :, 0], one["inputs"][1, :, 0])


@ways
@pytest.mark.parametrize("scale", [2.0**-40, 2.0**40])
def test_rows_of_extreme_size_are_picked_all_the_same(way, scale):
    a, g = random_rows(SHAPES[1], 40, dtype=torch.float32)
    out = method(way).wants(SHAPES[0])[0].compress(scale * a, scale * g, 0)
    usual = method(way).wants(SHAPES[0])[0].compress(a, g, 0)
    for key, tensor in usual.items():
        size = scale if key in {"inputs", "grads"} else 1
        torch.testing.assert_close(out[key], size * tensor, rtol=1e-5, atol=0)


# --- workers and scales --------------------------------------------------------------------------


@ways
def test_workers_share_one_curvature(way):
    """Two uneven workers and one without rows: the mean over all rows of what each picked."""
    shape, hylo = SHAPES[1], method(way, 0.5)
    a, g = random_rows(shape, 20)
    sizes = (12, 8, 0)
    parts = list(zip(a.split(sizes, dim=1), g.split(sizes, dim=1), strict=True))
    seen = [seen_of(hylo, *part, seed=k) for k, part in enumerate(parts)]
    states = run_workers(hylo, [start(hylo, shape) for _ in sizes], seen)
    assert equal(states[0], states[1]) and equal(states[0], states[2])
    alone = [estimate(run(hylo, start(hylo, shape), seen[k])) * sizes[k] / 20 for k in range(2)]
    torch.testing.assert_close(estimate(states[0]), sum(alone), rtol=1e-7, atol=1e-9)


@ways
@pytest.mark.parametrize("scale", [2.0**16, 0.125])
def test_a_loss_scale_comes_out(scale, way):
    shape, hylo = SHAPES[1], method(way)
    a, g = random_rows(shape, 12)
    true = torch.einsum("gno,gni->go", g / 12, a)
    scaled = replace(seen_of(hylo, a, g, loss_scale=scale), shown=scale * true, true=true)
    one = run(hylo, start(hylo, shape), scaled)
    two = run(hylo, start(hylo, shape), seen_of(hylo, a, g))
    for key in ("inputs", "outputs", "kernel"):
        torch.testing.assert_close(one[key], two[key], rtol=1e-9, atol=1e-12)


@ways
def test_no_rows_at_all_change_nothing(way):
    shape, hylo = SHAPES[1], method(way)
    state = updated(hylo, shape)
    before = copies(state)
    a, g = random_rows(shape, 1)
    none = seen_of(hylo, a[:, :0], g[:, :0] * 1)
    assert equal(run(hylo, state, replace(none, rows=torch.zeros(1))), before)


# --- what keeps it finite ------------------------------------------------------------------------


@ways
@pytest.mark.parametrize("part", [0, 1])
@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("row", range(0, 12, 3))
def test_a_row_that_is_not_finite_is_noticed_whether_picked_or_not(row, bad, part, way):
    shape, hylo = SHAPES[1], method(way)
    state = updated(hylo, shape, seed=1)
    before = copies(state)
    sides = random_rows(shape, 12, seed=2)
    good = run(hylo, copies(state), seen_of(hylo, *sides))
    sides[part][1, row, 0] = bad
    state = run(hylo, state, seen_of(hylo, *sides))
    for key in ("inputs", "outputs", "kernel", "damping"):
        assert torch.equal(state[key][1], before[key][1])
        assert torch.equal(state[key][[0, 2]], good[key][[0, 2]])
    assert events(state, "skipped", "rejected", "resets") == [1, 0, 0]


@ways
@pytest.mark.parametrize("zero", ["inputs", "grads", "both"])
def test_rows_of_zeros_only_scale(zero, way):
    shape, hylo = SHAPES[1], method(way, damping=0.25)
    a, g = random_rows(shape, 12)
    a, g = a * (zero == "grads"), g * (zero == "inputs")
    state = run(hylo, start(hylo, shape), seen_of(hylo, a, g))
    grad = gradient(shape)
    torch.testing.assert_close(hylo.precondition(state, grad), grad / 0.25)


@ways
@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e6])
@pytest.mark.parametrize("noise", [0.0, 1e-7, 1e-3])
def test_rows_that_nearly_repeat_each_other_are_no_trouble(noise, scale, way):
    shape, hylo = LayerShape(2, 8, 9), method(way, damping=1e-12)
    one, many = random_rows(shape, 1, 0, torch.float32), random_rows(shape, 300, 1, torch.float32)
    a, g = (x + noise * y for x, y in zip(one, many, strict=True))
    state = run(hylo, start(hylo, shape, torch.float32), seen_of(hylo, a, scale * g))
    assert events(state, "skipped", "rejected") == [0, 0]
    grad = gradient(shape).float()
    out = hylo.precondition(state, grad)
    assert torch.isfinite(out).all() and (out * grad).sum() > 0


def test_nothing_waits_for_the_device():
    """A meta tensor has no values, so that reading one raises."""
    a, g = torch.randn(2, 40, 5, device="meta"), torch.randn(2, 40, 4, device="meta")
    hylo = method("kid")
    state = hylo.init(LayerShape(2, 4, 5), torch.device("meta"), torch.float32)
    seen = seen_of(hylo, a, g)
    for _ in range(2):
        state = run(hylo, state, replace(seen, rows=torch.ones(1, device="meta")))
        assert hylo.precondition(state, torch.empty(2, 4, 5, device="meta")).shape == (2, 4, 5)
    with pytest.raises(RuntimeError):
        state["damping"][0].item()


# --- which way -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sizes", "fast"),
    [
        ((), True),
        ((2.0,), True),
        ((1.0, 1.4), False),
        ((1.0, 1.5), True),
        ((1.0, 0.5), True),
        ((1.0, 0.6), False),
        ((0.0, 0.0), True),
        ((1.0, float("nan")), True),
        ((float("inf"), 1.0), True),
    ],
)
def test_the_relative_change_of_the_gradient_decides(sizes, fast):
    """Where the sizes don't tell, the more accurate way is taken."""
    assert changes_fast(sizes, 0.5) is fast


def test_auto_follows_what_it_learns_and_the_others_do_not_listen():
    hylo = method("auto")
    assert hylo.listens() == 100 and hylo.choice() == "kid"
    calm = hylo.learn((1.0, 1.1))
    assert calm.choice() == "kis" and calm.learn((1.1, 3.0)).choice() == "kid"
    assert calm.wants(SHAPES[0])[0].compress.func is rows.sample
    assert hylo.wants(SHAPES[0])[0].compress.func is interpolative.decompose
    for way in WAYS:
        assert method(way).listens() == 0 and method(way).choice() == way


def test_the_way_and_the_damping_may_follow_the_step():
    hylo = method(lambda step: "kid" if step < 5 else "kis", damping=lambda step: 0.1 * (step + 1))
    assert [hylo.at(step).choice() for step in (0, 4, 5)] == ["kid", "kid", "kis"]
    assert updated(hylo.at(4), SHAPES[0])["damping"].tolist() == [0.5]
