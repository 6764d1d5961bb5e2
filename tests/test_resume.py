"""Exact resume: ten steps, a checkpoint, ten more in a fresh process equal twenty in one.

Run as a script with a folder, this file is that fresh process: it resumes every checkpoint there.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import mkor

STEPS = 10

BASES = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, foreach=False),
    "sgd-foreach": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, foreach=True),
    "sgd-fused": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True, fused=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1, foreach=False),
    "adamw-foreach": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1, foreach=True),
    "adamw-fused": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1, fused=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.5),
}

OPTIONS = {
    "exact": {"rule": "exact"},
    "paper": {"rule": "paper"},
    "reference": {"rule": "reference"},
    "exact-3": {"rule": "exact", "vectors": 3},
    "paper-3-bf16": {"rule": "paper", "vectors": 3, "state_dtype": torch.bfloat16},
    "reference-3-fp16": {"rule": "reference", "vectors": 3, "state_dtype": torch.float16},
    "window": {"representation": "window", "window": 9, "vectors": 2},
    "dense-and-window": {"max_dim": 8, "wide_sides": "window", "window": 9, "vectors": 2},
    "lowrank-sketch-bf16": {
        **{"representation": "lowrank", "statistic": "sketch", "vectors": 3, "rank": 5},
        "state_dtype": torch.bfloat16,
    },
    "raw": {"damping": None, "norm_limit": 1.5, "on_nonfinite": "reset"},
}

CASES = [f"{base}+{options}" for base in BASES for options in OPTIONS]


class Net(nn.Module):
    """A layer of each kind, with dropout."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(7, 6)
        self.mix = nn.MultiheadAttention(6, 2, batch_first=True)
        self.norm = nn.LayerNorm(6)
        self.conv = nn.Conv1d(6, 4, 2)
        self.drop = nn.Dropout(0.2)
        self.head = nn.Linear(16, 7, bias=False)

    def forward(self, tokens):
        h = self.embed(tokens)
        h = self.norm(h + self.mix(h, h, h)[0])
        return self.head(self.drop(torch.tanh(self.conv(h.mT)).flatten(1)))


def build(case):
    """Model, optimizer and scheduler; updates fall in steps 0, 1, 2, 4, 8, 12 and 16."""
    base, options = case.split("+")
    torch.manual_seed(0)
    model = Net()
    decay = [p for p in model.parameters() if p.dim() > 1]
    groups = [{"params": decay}, {"params": [p for p in model.parameters() if p.dim() < 2]}]
    optimizer = mkor.MKOR(
        model, BASES[base](groups), factor_update_steps=4, warmup_steps=3, **OPTIONS[options]
    )
    return model, optimizer, torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.05, 2 * STEPS)


def train(parts, first, last):
    """Steps `first` to `last` on the data that belong to them; the losses."""
    model, optimizer, scheduler = parts
    losses = []
    for step in range(first, last):
        torch.manual_seed(100 + step)
        tokens = torch.randint(0, 7, (8, 5))
        loss = F.cross_entropy(model(tokens), tokens.sum(dim=1) % 7)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        losses.append(loss.item())
    return losses


def states(parts):
    return [part.state_dict() for part in parts]


def resume(folder):
    """Go on from every checkpoint of the folder and save where that ends."""
    torch.set_num_threads(1)
    for path in sorted(folder.glob("*.ckpt")):
        parts = build(path.stem)
        for part, state in zip(parts, torch.load(path, weights_only=True), strict=True):
            part.load_state_dict(state)
        losses = train(parts, STEPS, 2 * STEPS)
        torch.save([losses, *states(parts)], path.with_suffix(".end"))


@pytest.fixture(scope="module")
def resumed(tmp_path_factory):
    """Folder with the ends that a fresh process reached from the checkpoints of this one."""
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("resume")
    for case in CASES:
        parts = build(case)
        train(parts, 0, STEPS)
        torch.save(states(parts), folder / f"{case}.ckpt")
    source = str(Path(mkor.__file__).parents[1])
    command = [sys.executable, "-W", "error", __file__, str(folder)]
    done = subprocess.run(
        command,
        env={**os.environ, "PYTHONPATH": source, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return folder


def assert_equal(left, right, path="state"):
    """Nested states are equal to the last bit."""
    assert type(left) is type(right), path
    if isinstance(left, torch.Tensor):
        assert left.dtype == right.dtype and torch.equal(left, right), path
    elif isinstance(left, dict):
        assert left.keys() == right.keys(), path
        for key in left:
            assert_equal(left[key], right[key], f"{path}[{key!r}]")
    elif isinstance(left, (list, tuple)):
        assert len(left) == len(right), path
        for i, (a, b) in enumerate(zip(left, right, strict=True)):
            assert_equal(a, b, f"{path}[{i}]")
    else:
        assert left == right, path


@pytest.mark.parametrize("case", CASES)
def test_a_fresh_process_resumes_to_the_last_bit(case, resumed):
    parts = build(case)
    losses = train(parts, 0, 2 * STEPS)
    ends = torch.load(resumed / f"{case}.end", weights_only=True)
    assert ends[0] == losses[STEPS:]
    assert_equal(ends[1:], states(parts))
    layers = ends[2]["preconditioner"]["layers"]
    assert list(layers) == ["mix.in_proj", "mix.out_proj", "conv", "head"]
    assert {(layer["updates"], layer["last_update"]) for layer in layers.values()} == {(7, 16)}


@pytest.mark.parametrize("lost", ["factors", "step", "base", "scheduler"])
def test_a_part_of_the_state_that_is_lost_shows(lost, resumed):
    case = "adamw+exact"
    parts = build(case)
    saved = torch.load(resumed / f"{case}.ckpt", weights_only=True)
    if lost == "factors":
        for layer in saved[1]["preconditioner"]["layers"].values():
            layer["state"] = {}
    elif lost == "step":
        saved[1]["preconditioner"]["step"] = 0
    elif lost == "base":
        saved[1]["state"] = {}
    for part, state in zip(parts, saved, strict=True):
        if not (lost == "scheduler" and part is parts[2]):
            part.load_state_dict(state)
    losses = train(parts, STEPS, 2 * STEPS)
    assert losses != torch.load(resumed / f"{case}.end", weights_only=True)[0]


if __name__ == "__main__":
    resume(Path(sys.argv[1]))
