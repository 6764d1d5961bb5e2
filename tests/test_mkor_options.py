"""Options of MKOR's representations and statistics: checks, sizes, reports."""

import pytest
import torch
from torch import nn

import mkor

THIN = ["window", "lowrank"]
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


@thin
@pytest.mark.parametrize("statistic", ["mean", "sketch"])
@pytest.mark.parametrize("scale", [1e-6, 1e6])
def test_the_scale_of_the_loss_changes_nothing(scale, statistic, representation):
    """Nor do changes of it between steps that a loss scaler undoes."""

    def run(scales, unscale):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3, bias=False)).double()
        options = {"representation": representation, "statistic": statistic, "vectors": 2}
        optimizer = build(model, **options, **({"window": 4} if representation == "window" else {}))
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
