"""Snippets of the documentation run as they are printed."""

import math

import pytest
import torch
from torch import nn

import mkor
from test_docs import DOCS, blocks


def snippets(page, word):
    """The Python blocks of a page that hold a word, those in lists as well."""
    return [text for text in blocks(DOCS / page, "python") if word in text]


@pytest.mark.parametrize("text", snippets("use.md", "KneePointLR"))
def test_knee_points_alone_and_after_a_warm_up(text):
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    seen = []

    def train(model, optimizer):
        seen.append(optimizer.param_groups[0]["lr"])
        optimizer.step()

    names = {
        "mkor": mkor,
        "torch": torch,
        "epochs": 60,
        "train": train,
        "validation_loss": lambda _: math.exp(-len(seen) / 5),
    }
    exec(text, {**names, "model": model, "optimizer": optimizer})
    warm = "warm" in text
    assert seen[0] == pytest.approx(0.1 if warm else 1.0)
    assert seen[8] == pytest.approx(1.0)
    assert seen[-1] <= 0.5
