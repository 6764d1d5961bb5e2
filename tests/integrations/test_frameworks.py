"""Versions of frameworks, and finding the optimizer inside what they wrap around it."""

from importlib import metadata

import pytest
import torch
from torch import nn

import mkor
from mkor.integrations import frameworks


def test_a_framework_that_is_absent():
    message = (
        "^nonesuch 3.1 or newer is needed, and none is installed: "
        r"pip install --upgrade 'nonesuch>=3.1'$"
    )
    with pytest.raises(ImportError, match=message):
        frameworks.load("nonesuch.part", "3.1")


def test_a_framework_that_is_too_old(monkeypatch):
    monkeypatch.setattr(metadata, "version", lambda package: "4.57.6")
    message = (
        "^transformers 5.0 or newer is needed, and 4.57.6 is installed: "
        r"pip install --upgrade 'transformers>=5.0'$"
    )
    with pytest.raises(ImportError, match=message):
        frameworks.load("transformers", "5.0")


@pytest.mark.parametrize(
    ("version", "numbers"),
    [("5.24.0", (5, 24, 0)), ("2.6", (2, 6)), ("5.0.0rc1", (5, 0, 0)), ("1.2.dev3", (1, 2))],
)
def test_versions_are_compared_by_their_numbers(version, numbers):
    assert frameworks.release(version) == numbers
    assert frameworks.release("5.10") > frameworks.release("5.9")


def test_the_optimizer_inside_wrappers():
    model = nn.Linear(3, 2)
    own = mkor.MKOR(model, torch.optim.SGD(model.parameters(), lr=0.1))

    class Wrapper:
        def __init__(self, optimizer):
            self.optimizer = optimizer

    assert frameworks.unwrapped(Wrapper(Wrapper(own))) is own
    assert frameworks.unwrapped(own) is own
    assert frameworks.unwrapped(Wrapper(own.base)) is None
    assert frameworks.unwrapped(None) is None


def test_counts_are_of_preconditioned_layers():
    model = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 2))
    own = mkor.MKOR(model, torch.optim.SGD(model.parameters(), lr=0.1))
    model(torch.randn(5, 3)).square().mean().backward()
    own.step()
    assert frameworks.counts(own) == {
        "mkor/layers": 2,
        "mkor/updates": 1,
        "mkor/skipped": 0,
        "mkor/resets": 0,
    }
