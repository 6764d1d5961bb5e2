"""The presets are the published formulas, checked by hand in float64."""

import pytest
import torch
from torch import nn

import mkor

GAMMA, BLEND, LIMIT = 0.9, 0.95, 2.0


def eq5(inverse, v):
    """Algorithm 1, lines 5-8, of one side."""
    size = inverse.abs().max()
    if size > LIMIT or size < 1 / LIMIT:
        weight = min(BLEND, LIMIT / size.item())
        inverse = weight * inverse + (1 - weight) * torch.eye(len(v), dtype=v.dtype)
    jv = inverse @ v
    scale = (1 - GAMMA) / (GAMMA**2 * (1 + GAMMA * (1 - GAMMA) * v @ jv))
    return GAMMA * inverse + scale * torch.outer(jv, jv)


def released(inverse, v):
    """The released code's update of one side."""
    mixed = BLEND * inverse + (1 - BLEND) * torch.eye(len(v), dtype=v.dtype)
    bv = mixed @ v
    new = mixed - torch.outer(bv, bv) / (1 + v @ bv)
    return torch.eye(len(v), dtype=v.dtype) if new.abs().max() > LIMIT else new


@pytest.mark.parametrize(
    ("options", "rule"),
    [(mkor.presets.paper(half=False), eq5), (mkor.presets.reference(), released)],
    ids=["paper", "reference"],
)
def test_a_preset_is_the_published_rule(options, rule):
    torch.manual_seed(0)
    model = nn.Linear(4, 3).double()
    optimizer = mkor.MKOR(
        model, torch.optim.SGD(model.parameters(), lr=0.0), **{**options, "factor_update_steps": 1}
    )
    inputs, outputs = torch.eye(5).double(), torch.eye(3).double()
    for _ in range(3):
        x = torch.randn(6, 4, dtype=torch.float64)
        optimizer.zero_grad()
        model(x).square().mean().backward()
        grad = torch.cat([model.weight.grad, model.bias.grad[:, None]], dim=1).clone()
        mean = torch.cat([x.mean(dim=0), torch.ones(1, dtype=torch.float64)])
        inputs, outputs = rule(inputs, mean), rule(outputs, grad[:, -1])
        optimizer.step()
        update = outputs @ grad @ inputs
        expected = update * grad.norm() / update.norm()
        found = torch.cat([model.weight.grad, model.bias.grad[:, None]], dim=1)
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)


def test_the_paper_keeps_factors_and_messages_in_half_precision():
    options = mkor.presets.paper()
    assert options["state_dtype"] == options["wire_dtype"] == torch.bfloat16
    model = nn.Linear(4, 3)
    optimizer = mkor.MKOR(model, torch.optim.SGD(model.parameters(), lr=0.1), **options)
    model(torch.randn(6, 4)).square().mean().backward()
    optimizer.step()
    assert optimizer.layers()[0].updates == 1
