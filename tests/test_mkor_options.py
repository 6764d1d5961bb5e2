"""Options of MKOR's representations and statistics: checks, sizes, reports."""

import pytest
import torch
from torch import nn

import mkor
from cases.test_batches import LargestOutput

THIN = ["window", "lowrank"]
KEPT = {
    "window": {"representation": "window", "window": 4},
    "lowrank": {"representation": "lowrank"},
    "dense and a window": {"max_dim": 6, "wide_sides": "window", "window": 4},
    "dense and low rank": {"max_dim": 6, "wide_sides": "lowrank", "rank": 3},
}
thin = pytest.mark.parametrize("representation", THIN)


def build(model=None, **options):
    model = model or nn.Linear(4, 3)
    return mkor.MKOR(model, torch.optim.SGD(model.parameters(), lr=0.1), **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"representation": "low_rank"}, "did you mean 'lowrank'"),
        ({"statistic": "means"}, "did you mean 'mean'"),
        ({"window": 0, "representation": "window"}, "window=0 is out of range"),
        ({"rank": 1.5, "representation": "lowrank"}, "rank=1.5 is out of range"),
        ({"representation": "lowrank", "rule": "paper"}, "rule='paper' has no effect"),
        ({"representation": "window", "norm_limit": 3.0}, "norm_limit=3.0 has no effect"),
        ({"representation": "window", "blend": 0.5}, "blend=0.5 has no effect"),
        ({"representation": "lowrank", "max_dim": 5}, "max_dim=5 has no effect"),
        ({"representation": "lowrank", "window": 5}, "belongs to representation='window'"),
        ({"representation": "window", "rank": 5}, "belongs to representation='lowrank'"),
        ({"rank": 5}, "belongs to representation='lowrank'"),
        ({"representation": "lowrank", "damping": None}, "choose a positive number"),
        ({"representation": "window", "window": 3, "vectors": 4}, "at least one update"),
        ({"packed": "True"}, "packed='True' is out of range: packed must be True or False"),
        ({"packed": 1}, "packed=1 is out of range"),
        ({"representation": "lowrank", "packed": True}, "packed=True has no effect"),
        ({"wide_sides": "windows"}, "did you mean 'window'"),
        (
            {"wide_sides": "dense"},
            "wide_sides='dense' is unknown: choose from None, 'window', 'lowrank'",
        ),
        ({"wide_sides": True}, "wide_sides=True is unknown"),
        (
            {"wide_sides": "window", "representation": "lowrank"},
            "wide_sides='window' has no effect",
        ),
        ({"wide_sides": "window", "rank": 5}, "or wide_sides='lowrank'"),
        ({"wide_sides": "lowrank", "window": 5}, "or wide_sides='window'"),
        ({"wide_sides": "lowrank", "power": 0.5}, "power=0.5 has no effect"),
        ({"wide_sides": "window", "damping": None}, "not possible with wide_sides='window'"),
        ({"wide_sides": "window", "window": 3, "vectors": 4}, "don't fit into window=3"),
    ],
)
def test_options_that_make_no_sense_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        build(**options)


@thin
def test_wide_sides_have_rows_and_narrow_ones_fewer(representation):
    optimizer = build(nn.Linear(20000, 3, bias=False), representation=representation)
    (info,) = optimizer.layers()
    assert info.preconditioned and info.reason is None
    assert 0 < info.bytes < 4 * 20000 * 200
    state = optimizer._engine.state(info.name)
    assert state["outputs"].shape == (1, 3, 3)  # no more rows than a side is long
    assert state["inputs"].shape == (1, 160 if representation == "window" else 40, 20000)


@pytest.mark.parametrize("kept", KEPT)
@pytest.mark.parametrize("statistic", ["mean", "sketch"])
@pytest.mark.parametrize("scale", [1e-6, 1e6])
def test_the_scale_of_the_loss_changes_nothing(scale, statistic, kept):
    """Nor do changes of it between steps that a loss scaler undoes."""

    def run(scales, unscale):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3, bias=False)).double()
        optimizer = build(model, statistic=statistic, vectors=2, **KEPT[kept])
        directions = []
        for factor in scales:
            loss = model(torch.randn(10, 6).double()).square().mean()
            (factor * loss).backward()
            for p in model.parameters():
                p.grad.div_(factor if unscale else 1)
            optimizer.precondition()
            directions += [p.grad / (1 if unscale else factor) for p in model.parameters()]
            optimizer.base.zero_grad()
            optimizer._engine.advance()
        return directions

    plain = run([1.0] * 4, False)
    torch.testing.assert_close(run([scale] * 4, False), plain, rtol=1e-6, atol=1e-12)
    torch.testing.assert_close(run([1.0, scale, 7.0, scale], True), plain, rtol=1e-6, atol=1e-12)


@thin
def test_a_side_of_zero_vectors_keeps_its_rows(representation):
    model = nn.Linear(4, 3)
    optimizer = build(model, representation=representation, statistic="sketch", vectors=3)
    model(torch.randn(6, 4)).square().mean().backward()
    optimizer.step()
    (state,) = optimizer._engine.records.values()
    before = {key: tensor.clone() for key, tensor in state.state.items()}
    optimizer.zero_grad()
    (0 * model(torch.randn(6, 4))).sum().backward()
    optimizer.step()
    same = {key: torch.equal(before[key], tensor) for key, tensor in state.state.items()}
    assert all(same[key] for key in same if key.startswith("outputs")) and not same["inputs"]


def test_attention_is_sketched_on_its_input_side_alone():
    """The rows of its output gradients are out of sight; the bias shows their sum."""
    attention = nn.MultiheadAttention(4, 2, batch_first=True)
    optimizer = build(attention, representation="lowrank", statistic="sketch", vectors=3)
    x = torch.randn(5, 6, 4)
    (attention(x, x, x)[0] * torch.randn(5, 6, 4)).sum().backward()
    optimizer.step()
    state = next(iter(optimizer._engine.records.values())).state
    assert (state["inputs_sizes"] > 0).sum(dim=-1).tolist() == [3, 3, 3]
    assert (state["outputs_sizes"] > 0).sum(dim=-1).tolist() == [1, 0, 1]  # keys: only noise


HEAD = {"max_dim": 1024, "factor_update_steps": 1}


@pytest.mark.parametrize("statistic", ["mean", "sketch"])
@pytest.mark.parametrize(("wide_sides", "rows"), [("window", 160), ("lowrank", 40)])
def test_a_vocabulary_head_has_rows_on_its_wide_side(wide_sides, rows, statistic):
    """30,000 outputs, of which a matrix would take 3.4 GiB; its 65 inputs have one."""
    model = nn.Linear(64, 30_000)
    options = {**HEAD, "statistic": statistic, "vectors": 1 if statistic == "mean" else 4}
    optimizer = build(model, wide_sides=wide_sides, **options)
    told = mkor.estimate(model, mkor.MKOR, rows=16, wide_sides=wide_sides, **options)
    for _ in range(3):
        optimizer.zero_grad()
        inputs, labels = torch.randn(16, 64), torch.randint(30_000, (16,))
        loss = nn.functional.cross_entropy(model(inputs), labels)
        loss.backward()
        with LargestOutput() as largest:
            optimizer.step()
        assert largest.numel <= max(65, rows + options["vectors"]) * 30_000
    (info,) = optimizer.layers()
    assert info.preconditioned and info.reason is None and info.updates == 3
    small = 65**2 + 2 * rows**2 + rows + 100  # a matrix of inputs, the small ones of rows
    assert 4 * rows * 30_000 < info.bytes == told.bytes < 4 * (rows * 30_000 + small)
    state = optimizer._engine.state(info.name)
    assert state["outputs"].shape == (1, rows, 30_000) and state["inputs"].shape == (1, 65, 65)
    assert int((state["outputs_sizes"] > 0).sum()) == 3 * options["vectors"]
    assert nn.functional.cross_entropy(model(inputs), labels) < loss


def test_the_wide_side_changes_the_update_and_the_narrow_one_stays_as_it_is():
    updates, factors = [], []
    for options in ({}, {"wide_sides": "window"}):
        torch.manual_seed(0)
        model = nn.Linear(5, 30).double()
        optimizer = build(model, max_dim=8, **options)
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.randn(7, 5).double()).square().mean().backward()
            optimizer.precondition()
            optimizer._engine.advance()
        updates.append(model.weight.grad.clone())
        (info,) = optimizer.layers()
        factors.append(optimizer._engine.state(info.name)["inputs"])
    assert torch.equal(*factors)
    assert float((updates[0] - updates[1]).norm() / updates[0].norm()) > 0.01
