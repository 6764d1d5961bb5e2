"""Layers divided among workers: the same training as one worker's, with a part of the memory."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import mkor
from gloo import spawn

SAMPLES, STEPS = 12, 7
SCHEDULE = {"factor_update_steps": 2, "warmup_steps": 3}
JOBS = {
    "K-FAC, eigen": ("KFAC", {"kl_clip": 0.01}),
    "K-FAC, inverse": ("KFAC", {"solver": "inverse", "inverse_update_steps": 4}),
    "K-FAC, one side": ("KFAC", {"max_dim": 8}),
    "MKOR": ("MKOR", {}),
    "MKOR, packed": ("MKOR", {"packed": True}),
    "MKOR, window": ("MKOR", {"representation": "window", "window": 4}),
    "MKOR, dense and a window": ("MKOR", {"max_dim": 8, "wide_sides": "window", "window": 4}),
    "MKOR, momentum": ("MKOR", {"momentum": 0.9, "rescale": "rms"}),
    "SNGD": ("SNGD", {}),
    "K-BFGS": ("KBFGS", {}),
    "HyLo, all rows": ("HyLo", {"rank": 1.0}),
}
ON_FOUR = ("K-FAC, eigen", "K-FAC, inverse", "MKOR")
FRACTIONS = {2: (0.5, 1.0), 4: (0.25, 0.5, 1.0)}


class Net(nn.Module):
    """Equal layers, which can be divided, around a convolution with groups and a branch."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv1d(2, 8, 3, padding=1, groups=2)
        self.layers = nn.ModuleList([nn.Linear(8, 8, bias=bool(i % 2)) for i in range(8)])
        self.branch = nn.Linear(8, 8)
        self.head = nn.Linear(8, 2)

    def forward(self, rows, branch):
        hidden = self.conv(rows).mean(dim=-1)
        for layer in self.layers:
            hidden = hidden + layer(hidden).tanh()
        if branch:
            hidden = hidden + self.branch(hidden).tanh()
        return self.head(hidden)


def new(share, method, fraction, options):
    """A model, its optimizer, and a function that trains it by one step on a share of a batch."""
    torch.manual_seed(3)
    model = Net().double()
    if share != slice(None):
        model = DistributedDataParallel(model, find_unused_parameters=True)
    base = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    own = {**SCHEDULE, "grad_worker_fraction": fraction, "agreement_steps": 2, **options}
    optimizer = getattr(mkor, method)(model, base, **own)

    def step(number):
        source = torch.Generator().manual_seed(number)
        rows = torch.randn(SAMPLES, 2, 3, dtype=torch.float64, generator=source)[share]
        goal = torch.randn(SAMPLES, 2, dtype=torch.float64, generator=source)[share]

        def closure():
            optimizer.zero_grad()
            loss = (model(rows, branch=number != 1) - goal).square().mean()
            loss.backward()
            return loss

        optimizer.step(closure)

    return model, optimizer, step


def parameters(model):
    named = {name.replace("module.", ""): p for name, p in model.named_parameters()}
    return {name: p.detach().clone() for name, p in named.items()}


def train(share, method, fraction, options):
    """Parameters after training, the bytes kept here, and the gathered state."""
    model, optimizer, step = new(share, method, fraction, options)
    for number in range(STEPS):
        step(number)
    kept = sum(layer.bytes for layer in optimizer.layers())
    saved = optimizer.state_dict()["preconditioner"]["layers"]
    states = {name: copy.deepcopy(layer["state"]) for name, layer in saved.items()}
    return parameters(model), kept, states


def worker(rank, jobs, fractions, workers):
    each = SAMPLES // workers
    share = slice(rank * each, (rank + 1) * each)
    return {
        (name, fraction): train(share, method, fraction, options)
        for name, (method, options) in jobs.items()
        for fraction in fractions
    }


def furthest(actual, expected):
    assert actual.keys() == expected.keys()
    return max(
        float((actual[key] - there).abs().max() / there.abs().max())
        for key, there in expected.items()
    )


@pytest.mark.parametrize("workers", [2, 4])
def test_any_division_trains_as_one_worker_does(tmp_path, workers):
    jobs = JOBS if workers == 2 else {name: JOBS[name] for name in ON_FOUR}
    found = spawn(worker, tmp_path, jobs, FRACTIONS[workers], workers, workers=workers, timeout=240)
    for name, (method, options) in jobs.items():
        alone, whole, _ = train(slice(None), method, 1.0, options)
        for fraction in FRACTIONS[workers]:
            results = [rank[name, fraction] for rank in found]
            for parameters, _, states in results:
                assert furthest(parameters, alone) < 1e-6, (name, fraction)
                assert all(torch.equal(p, results[0][0][k]) for k, p in parameters.items()), name
                for layer, state in states.items():  # complete and the same on every worker
                    assert state.keys() == results[0][2][layer].keys()
                    assert state and all(
                        torch.equal(t, results[0][2][layer][k]) for k, t in state.items()
                    ), (name, fraction, layer)
            kept = [size for _, size, _ in results]
            assert sum(kept) == fraction * workers * whole, name
            assert max(kept) < 1.3 * fraction * whole, (name, kept)


def resume(rank, workers):
    """Save on all workers after some steps and go on in a new optimizer; both trainings."""
    each = SAMPLES // workers
    share = slice(rank * each, (rank + 1) * each)
    out = {}
    for name in ("K-FAC, eigen", "MKOR"):
        method, options = JOBS[name]
        model, optimizer, step = new(share, method, 0.5, options)
        for number in range(4):
            step(number)
        saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        for number in range(4, 6):
            step(number)
        other, loaded, again = new(share, method, 0.5, options)
        other.load_state_dict(saved[0])
        loaded.load_state_dict(saved[1])
        sizes = {layer.name: layer.bytes for layer in loaded.layers()}
        for number in range(4, 6):
            again(number)
        kept = {layer.name: layer.bytes for layer in optimizer.layers()}
        out[name] = parameters(model), parameters(other), sizes == kept, saved
    return out


def test_a_divided_state_is_saved_whole_and_goes_on_in_any_number_of_workers(tmp_path):
    found = spawn(resume, tmp_path, 2, timeout=240)
    for name, (straight, resumed, same_memory, (weights, saved)) in found[0].items():
        assert all(torch.equal(p, resumed[k]) for k, p in straight.items()), name
        assert same_memory
        model, optimizer, step = new(slice(None), *JOBS[name][:1], 1.0, JOBS[name][1])
        model.load_state_dict({key.replace("module.", ""): t for key, t in weights.items()})
        optimizer.load_state_dict(saved)
        for number in range(4, 6):
            step(number)
        assert furthest(parameters(model), straight) < 1e-6, name
