"""What an optimizer holds between steps: nothing is left out, whoever keeps it."""

import pytest
import torch
from torch import nn

from mkor_bench.memory import factor_bytes, held_bytes, peak_bytes
from mkor_bench.optimizers import optimizer_row

MATRICES, REST = 6 * 5 + 3 * 6, 6 + 3


def stepped(name):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3))
    optimizer = optimizer_row(name).build(model, 1e-3)
    model(torch.randn(8, 5)).square().sum().backward()
    optimizer.step()
    return optimizer


ADAMW = 2 * (MATRICES + REST) + 4  # and the number of the step of each parameter
HELD = {
    "sgd": MATRICES + REST,
    "adamw": ADAMW,
    "mkor": MATRICES + REST,  # of the base
    "auto": MATRICES + 2 * REST + 2,  # momentum of the matrices, AdamW's averages of the biases
    "muon": 30 + 2 * (MATRICES + REST - 30) + 3,  # the hidden weight's momentum, AdamW's averages
}
"""Numbers besides weights and factors."""


@pytest.mark.parametrize("name", HELD)
def test_what_is_held_is_counted(name):
    optimizer = stepped(name)
    extra = held_bytes(optimizer) - factor_bytes(optimizer) - 4 * (MATRICES + REST)
    assert extra == 4 * HELD[name]
    assert (factor_bytes(optimizer) > 0) == (name in {"mkor", "auto"})


@pytest.mark.filterwarnings("ignore:Memory block of unknown size")
def test_a_peak_is_above_what_is_held_by_what_a_step_needs():
    if torch.cuda.is_available():
        pytest.skip("a GPU counts its own memory")

    def step():
        large = torch.empty(1000)
        del large
        torch.empty(500)

    assert 4000 <= peak_bytes(step, held=100) - 100 < 8000
