"""`mkor.estimate` against formulas on paper; its bytes are held to real runs in distributed/."""

import pytest
import torch
from torch import nn

import mkor
from mkor.flops import FlopCounter

D, ROWS = 64, 16


def square(bias=False, device=None):
    return nn.Linear(D, D, bias=bias, device=device)


def only(found):
    (layer,) = found.layers
    return layer


@pytest.mark.parametrize(
    ("method", "options", "numbers"),
    [
        # Table 1 of the paper, with what it leaves out: numbers of rows, and sums that tell by how
        # much the gradient was scaled since the rows were seen.
        (mkor.MKOR, {}, 2 * D + 1),
        (mkor.MKOR, {"vectors": 3}, 3 * (2 * D + 1)),
        (mkor.MKOR, {"damping": None}, 3 * D + 1),
        (mkor.Eva, {}, 3 * D + 1),
        # Triangles of both moments; eigenvectors, eigenvalues and whether they are sound.
        (mkor.KFAC, {}, D * (D + 1) + D + 2 + 2 * (D * D + D + 1)),
        # Half of the paper's 4d².
        (mkor.KFAC, {"solver": "inverse"}, 2 * D * (D + 1) + D + 2 + 2),
        (mkor.SNGD, {}, D + 1 + 2 * 4 * ROWS * D),
    ],
)
def test_wire_is_what_is_known_on_paper(method, options, numbers):
    found = mkor.estimate(square(), method, rows=ROWS, workers=4, **options)
    counts = 2 * 4 * 8 if method is mkor.SNGD else 0  # of rows, in int64
    assert found.wire == only(found).wire == 4 * numbers + counts


def test_half_precision_on_the_wire_halves_it_and_a_bias_halves_it_again():
    full, half = (
        mkor.estimate(square(), mkor.MKOR, workers=2, wire_dtype=dtype).wire
        for dtype in (None, torch.bfloat16)
    )
    assert full == 2 * half
    biased = mkor.estimate(square(bias=True), mkor.MKOR, workers=2)
    assert biased.wire == 4 * (D + 2)  # the inputs with their constant, and the number of rows
    assert mkor.estimate(square(), mkor.MKOR).wire == 0  # nobody to send to


@pytest.mark.parametrize(
    ("method", "options", "products"),
    [
        (mkor.MKOR, {}, 4 * D**3),
        (mkor.KFAC, {"solver": "inverse"}, 4 * D**3),
        (mkor.KFAC, {"solver": "eigen"}, 8 * D**3),
        (mkor.KBFGS, {}, 4 * D**3),
        (mkor.Eva, {}, 4 * D**2),
    ],
)
def test_operations_of_a_step_are_its_products(method, options, products):
    found = mkor.estimate(square(), method, **options)
    assert products <= found.step_flops <= products + 8 * D**2


def test_operations_of_an_update_grow_as_the_paper_says():
    def grows(method, **options):
        sizes = [
            mkor.estimate(nn.Linear(d, d, bias=False), method, **options).update_flops
            for d in (512, 1024)
        ]
        return sizes[1] / sizes[0]

    assert 3.9 < grows(mkor.MKOR) < 4.1  # d²
    assert 7.5 < grows(mkor.KFAC) < 8.1  # d³
    assert 1.9 < grows(mkor.MKOR, representation="lowrank", rank=4) < 2.1  # d


def test_operations_of_hooks_follow_the_rows():
    few, many = (mkor.estimate(square(), mkor.KFAC, rows=n).update_flops for n in (10, 20))
    assert many - few == 10 * (2 * 2 * D * D + 2 * D)


def test_updates_come_as_often_as_their_schedule_says():
    found = mkor.estimate(square(), mkor.KFAC, workers=2, factor_update_steps=20)
    assert [round(update.share, 6) for update in found.updates] == [0.01, 0.04]
    dear, cheap = found.updates
    assert dear.flops - cheap.flops > 2 * 9 * D**3  # two decompositions
    assert found.mean_wire == pytest.approx(0.01 * dear.wire + 0.04 * cheap.wire)
    assert found.mean_flops == pytest.approx(
        found.step_flops + 0.01 * dear.flops + 0.04 * cheap.flops
    )


def test_layers_are_divided_among_workers():
    model = nn.Sequential(*[square() for _ in range(16)])
    whole = mkor.estimate(model, mkor.MKOR, workers=8)
    assert whole.bytes_by_worker == (whole.bytes,) * 8 and whole.step_wire == 0
    half = mkor.estimate(model, mkor.MKOR, workers=8, grad_worker_fraction=0.5)
    least = mkor.estimate(model, mkor.MKOR, workers=8, grad_worker_fraction=1 / 8)
    assert [e.bytes * 8 // whole.bytes for e in (whole, half, least)] == [8, 4, 1]
    assert [e.step_flops * 8 // whole.step_flops for e in (whole, half, least)] == [8, 4, 1]
    assert least.step_wire == half.step_wire == 16 * 4 * D * D
    assert [c.workers for c in half.step_collectives + least.step_collectives] == [2, 8]
    assert whole.wire == half.wire == least.wire  # every holder makes its own update


def test_one_worker_decomposes_for_all():
    model = nn.Sequential(*[square() for _ in range(16)])
    alone, eight = (mkor.estimate(model, mkor.KFAC, workers=p) for p in (1, 8))
    assert 7 < alone.update_flops / eight.update_flops < 8
    assert alone.bytes == eight.bytes
    # A few layers among many workers are added up, or padding would outweigh them.
    (_, shared) = mkor.estimate(square(), mkor.KFAC, workers=8).updates[0].collectives
    assert (shared.kind, shared.bytes) == ("sum", 4 * 2 * (D * D + D + 1))


def test_no_memory_is_needed_and_the_model_stays_as_it_is():
    wide = nn.Sequential(nn.Linear(100_000, 8000, device="meta"), nn.ReLU())
    found = mkor.estimate(wide, mkor.KFAC, max_dim=200_000)
    assert found.bytes > 2 * 4 * 100_000**2
    model = square()
    mkor.estimate(model, mkor.SNGD, rows=3)
    assert not model._forward_hooks and model.weight.grad is None


def test_layers_that_are_left_out_say_why():
    model = nn.ModuleDict({"a": square(), "b": square(), "norm": nn.LayerNorm(4)})
    found = mkor.estimate(model, mkor.MKOR, skip=["b"], workers=2)
    reasons = {layer.name: (layer.reason, layer.wire) for layer in found.layers}
    assert reasons == {
        "a": (None, found.wire),
        "b": ("skipped by a skip pattern", 0),
        "norm": ("no rule for LayerNorm", 0),
    }


def test_frozen_layers_cost_nothing():
    """As the base model under adapters."""
    model = nn.ModuleDict({"a": square(), "b": square().requires_grad_(False)})
    found = mkor.estimate(model, mkor.KFAC)
    assert [(layer.name, layer.reason) for layer in found.layers] == [("a", None), ("b", "frozen")]
    assert found.bytes == mkor.estimate(nn.ModuleDict({"a": square()}), mkor.KFAC).bytes


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_auto_is_estimated_as_it_is_built(device):
    def model(device=None):
        kinds = {"device": device}
        return nn.Sequential(nn.Linear(8, 6, **kinds), nn.Tanh(), nn.Linear(6, 2, **kinds))

    found = mkor.estimate(model(device), mkor.auto, rows=4, rank=3)
    trained = model()
    optimizer = mkor.auto(trained, rank=3)
    for _ in range(3):
        trained(torch.randn(4, 8)).sum().backward()
        optimizer.step()
    own = {info.name: info.bytes for info in optimizer.layers() if info.preconditioned}
    assert own and {layer.name: layer.bytes for layer in found.layers if not layer.reason} == own
    left = mkor.estimate(model(device), mkor.auto, rank=3, adamw=["2"])
    assert left.bytes == own["0"]


def test_a_model_that_auto_was_asked_about_stays_as_it_is():
    model = nn.Sequential(square())
    mkor.estimate(model, mkor.auto)
    assert not model[0]._forward_hooks
    mkor.auto(model).close()


def test_rows_may_differ_between_layers():
    model = nn.ModuleDict({"a": square(), "b": square()})
    found = mkor.estimate(model, mkor.SNGD, rows={"a": 3, "b": 6})
    first, second = (layer.bytes for layer in found.layers)
    assert second - first == 4 * (3 * 2 * D + 36 - 9)
    with pytest.raises(ValueError, match="rows has no number for layer 'b': name every layer"):
        mkor.estimate(model, mkor.SNGD, rows={"a": 3})


def test_it_prints_a_table():
    model = nn.Sequential(*[square() for _ in range(15)])
    text = repr(mkor.estimate(model, mkor.MKOR, workers=8))
    assert text.startswith("mkor on 8 workers: 15 layers preconditioned\nlayer")
    assert "... and 3 more" in text
    assert text.splitlines()[2].split()[:4] == ["0", "64x64", "32.1", "KiB"]
    assert text.endswith("flop") and "a step on average: " in text
    model = nn.Sequential(square(), nn.LayerNorm(D), square().requires_grad_(False))
    text = repr(mkor.estimate(model, mkor.MKOR))
    assert text.startswith("mkor on 1 worker: 1 layer preconditioned\nlayer")
    assert text.endswith(
        "base optimizer only: 1 x no rule for LayerNorm\nbase optimizer only: 1 x frozen"
    )


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"method": "MKOR"}, TypeError, "must be the class of an optimizer such as mkor.MKOR"),
        ({"method": mkor.LAMB}, TypeError, "must be the class of an optimizer"),
        ({"workers": 0}, ValueError, "workers=0 is out of range: workers must be an integer of"),
        ({"rows": 0}, ValueError, "rows=0 is out of range: rows must be an integer of at least 1"),
        ({"model": [1]}, TypeError, "model must be a torch.nn.Module, got list"),
        ({"workers": 10**20}, ValueError, "workers must be at most 1048576"),
        ({"rows": 10**30}, ValueError, "rows must be at most 1099511627776"),
        ({"skip": "head"}, ValueError, "skip must be a sequence of regular expressions"),
        ({"skip": ["("]}, ValueError, r"skip='\(' is no regular expression"),
        ({"rule": "exakt"}, ValueError, "rule='exakt' is unknown"),
        ({"lr": 1}, TypeError, "unexpected keyword argument 'lr'"),
    ],
)
def test_mistakes_are_told(arguments, error, message):
    with pytest.raises(error, match=message):
        mkor.estimate(**{"model": square(), "method": mkor.MKOR, **arguments})


def test_the_counter_knows_products_and_decompositions():
    a, b = torch.zeros(2, 3, 4, device="meta"), torch.zeros(2, 4, 5, device="meta")
    square = torch.zeros(2, 6, 6, device="meta")
    cases = {
        2 * 2 * 3 * 4 * 5: lambda: a @ b,
        2 * 12: lambda: a[0].mv(b[0, :, 0]),
        2 * 72: lambda: torch.linalg.cholesky_ex(square),
        9 * 2 * 216: lambda: torch.linalg.eigh(square),
        2 * 36 * 5: lambda: torch.linalg.solve_triangular(square, square[..., :5], upper=False),
        24: lambda: a + 1,
        0: a.mT.clone,
    }
    for operations, code in cases.items():
        with FlopCounter() as counter:
            code()
        assert counter.total == operations


def test_layers_that_are_too_wide_say_so_before_training():
    model = nn.ModuleDict({"both": nn.Linear(9, 8), "one": nn.Linear(9, 3)})
    found = mkor.estimate(model, mkor.MKOR, max_dim=5)
    reasons = {layer.name: layer.reason for layer in found.layers}
    assert reasons == {"one": None, "both": "both sides are wider than max_dim=5"}
    found = mkor.estimate(model, mkor.MKOR, max_dim=5, wide_sides="lowrank")
    assert all(layer.reason is None and layer.bytes > 0 for layer in found.layers)
