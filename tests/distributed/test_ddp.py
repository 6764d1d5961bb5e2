"""Two workers under DDP do what one does on the union of their batches, and stay equal."""

import time

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import mkor
from gloo import spawn

STEPS, SAMPLES = 6, 12
UNUSED = {1: (0, 1), 3: (1,), 4: (0,)}  # workers that leave the branch out, by step


class Net(nn.Module):
    """Biased, bias-free, convolution, attention, and a branch that may be left out."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv1d(2, 4, 3, padding=1, groups=2, bias=False)
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        self.free = nn.Linear(4, 5, bias=False)
        self.branch = nn.Linear(5, 5)
        self.free_branch = nn.Linear(5, 5, bias=False)
        self.head = nn.Linear(5, 2)

    def forward(self, rows, branch):
        tokens = self.conv(rows).relu().mT
        tokens = self.attention(tokens, tokens, tokens, need_weights=False)[0]
        hidden = self.free(tokens).tanh()
        if branch:
            hidden = hidden + self.free_branch(self.branch(hidden).tanh())
        return self.head(hidden).mean(dim=1)


def train(model, dtype, share, branch_in, method="MKOR", **options):
    """Train on a share of each batch; parameters and factors in the end."""
    base = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    schedule = {"factor_update_steps": 2, "warmup_steps": 3}
    optimizer = getattr(mkor, method)(model, base, **schedule, **options)
    source = torch.Generator().manual_seed(7)
    for step in range(STEPS):
        rows = torch.randn(SAMPLES, 2, 3, dtype=dtype, generator=source)[share]
        goal = torch.randn(SAMPLES, 2, dtype=dtype, generator=source)[share]
        optimizer.step(closure_of(model, optimizer, rows, goal, branch_in(step)))
    out = {f"parameter {name}": p.detach() for name, p in optimizer.model.named_parameters()}
    for name, layer in optimizer.state_dict()["preconditioner"]["layers"].items():
        assert layer["updates"] > 0, name
        out |= {f"factor {name} {key}": tensor for key, tensor in layer["state"].items()}
    return {key.replace("module.", ""): tensor.clone() for key, tensor in out.items()}


def closure_of(model, optimizer, rows, goal, branch):
    def closure():
        optimizer.zero_grad()
        loss = (model(rows, branch) - goal).square().mean()
        loss.backward()
        return loss

    return closure


def new_model(dtype):
    torch.manual_seed(3)
    return Net().to(dtype)


def branch_on_both(step):
    return len(UNUSED.get(step, ())) < 2


def worker(rank, jobs):
    """Each job: dtype, whether workers leave the branch out by themselves, options."""
    results = []
    for dtype, alone, options in jobs:
        model = DistributedDataParallel(new_model(dtype), find_unused_parameters=True)
        half = SAMPLES // 2
        share = slice(rank * half, (rank + 1) * half)

        def branch_here(step):
            return rank not in UNUSED.get(step, ())

        branch_in = branch_here if alone else branch_on_both
        results.append(train(model, dtype, share, branch_in, **options))
    return results


JOBS = {
    "one vector": (torch.float64, False, {}),
    "raw vectors": (torch.float64, False, {"damping": None}),
    "three vectors": (torch.float64, False, {"vectors": 3}),
    "bfloat16 on the wire": (torch.float32, False, {"wire_dtype": torch.bfloat16}),
    "float16 on the wire": (torch.float32, False, {"wire_dtype": torch.float16}),
    "unused on one worker": (torch.float64, True, {}),
    "window": (torch.float64, False, {"representation": "window", "window": 4}),
    "low rank": (torch.float64, False, {"representation": "lowrank", "rank": 30}),
    "dense and a window": (
        torch.float64,
        False,
        {"max_dim": 4, "wide_sides": "window", "window": 3},
    ),
    "dense and low rank": (
        torch.float64,
        False,
        {"max_dim": 4, "wide_sides": "lowrank", "rank": 3},
    ),
    "dense and low rank, sketch": (
        torch.float64,
        True,
        {
            **{"max_dim": 4, "wide_sides": "lowrank", "rank": 3},
            **{"statistic": "sketch", "vectors": 3},
        },
    ),
    "low rank, sketch": (
        torch.float64,
        True,
        {"representation": "lowrank", "statistic": "sketch", "vectors": 3},
    ),
    "K-FAC, eigen": (torch.float64, False, {"method": "KFAC"}),
    "K-FAC, inverse, reduce": (
        torch.float64,
        False,
        {"method": "KFAC", "solver": "inverse", "weight_sharing": "reduce"},
    ),
    "K-FAC, unused on one worker": (torch.float64, True, {"method": "KFAC"}),
    "Eva": (torch.float64, False, {"method": "Eva"}),
    "Eva, unused on one worker": (torch.float64, True, {"method": "Eva"}),
    "K-BFGS": (torch.float64, False, {"method": "KBFGS"}),
    "K-BFGS, unused on one worker": (torch.float64, True, {"method": "KBFGS", "memory": 3}),
    "SNGD": (torch.float64, False, {"method": "SNGD"}),
    "SNGD, unused on one worker": (torch.float64, True, {"method": "SNGD"}),
    "HyLo-KIS": (torch.float64, False, {"method": "HyLo", "sampling": "kis", "rank": 0.5}),
    "HyLo-KID, all rows": (
        torch.float64,
        False,
        {"method": "HyLo", "sampling": "kid", "rank": 1.0},
    ),
    "HyLo-KID, unused on one worker": (
        torch.float32,
        True,
        {"method": "HyLo", "sampling": "kid", "rank": 0.3},
    ),
    "unused on one worker, float32": (torch.float32, True, {"vectors": 2}),
}
# Jobs compared with one worker; several blocks, or rows that are drawn, are others on two workers.
UNION = dict.fromkeys(
    [
        *(
            "one vector",
            "raw vectors",
            "window",
            "low rank",
            "dense and a window",
            "dense and low rank",
            "K-FAC, eigen",
            "K-FAC, inverse, reduce",
        ),
        *("Eva", "K-BFGS", "SNGD", "HyLo-KID, all rows"),
    ],
    1e-6,
)
UNION |= {"bfloat16 on the wire": 5e-2, "float16 on the wire": 5e-3}


def distances(actual, expected):
    """Largest difference of each tensor, relative to its largest entry."""
    assert actual.keys() == expected.keys()
    # The sign of an eigenvector, and a base of equal eigenvalues, are anyone's choice.
    pairs = {k: (actual[k].double(), t.double()) for k, t in expected.items() if "vectors" not in k}
    return {
        key: float((here - there).abs().max() / there.abs().max().clamp_min(1e-3))
        for key, (here, there) in pairs.items()
    }


def test_two_workers_are_equal_and_do_what_one_does_on_the_union(tmp_path):
    """All jobs in one pair of processes: starting them is what takes time."""
    first, second = spawn(worker, tmp_path, list(JOBS.values()))
    for number, (job, (dtype, _, options)) in enumerate(JOBS.items()):
        here, there = first[number], second[number]
        assert here.keys() == there.keys()
        unequal = [key for key in here if not torch.equal(here[key], there[key])]
        assert unequal == [], job
        assert all(bool(torch.isfinite(tensor).all()) for tensor in here.values()), job
        if job in UNION:
            own = {key: value for key, value in options.items() if key != "wire_dtype"}
            model = new_model(dtype)
            alone = train(model, dtype, slice(None), branch_on_both, **own)
            if options.keys() & {
                "representation",
                "wide_sides",
            }:  # eigenvectors have any sign: their effect is compared
                here = {key: value for key, value in here.items() if "parameter" in key}
                alone = {key: alone[key] for key in here}
            off = {k: d for k, d in distances(here, alone).items() if not d < UNION[job]}
            assert off == {}, job
            if "wire_dtype" in options:  # it did cross in that dtype
                assert max(distances(here, alone).values()) > 1e-4


def fail_or_hang(rank):
    if rank == 1:
        raise ValueError("no luck")
    time.sleep(1000)


def test_a_worker_that_fails_ends_the_others(tmp_path):
    with pytest.raises(AssertionError, match=r"worker 1: (.|\n)*no luck"):
        spawn(fail_or_hang, tmp_path)


def test_workers_that_hang_are_ended(tmp_path):
    with pytest.raises(AssertionError, match="hung for 2 s"):
        spawn(fail_or_hang, tmp_path, workers=1, timeout=2)
