"""Workers whose losses differ hand over, and lower their learning rates, in the same step."""

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import mkor
from gloo import spawn

STEPS = 12
NAN = float("nan")

# Losses by worker; means of pairs over both are 3, 2, 2 for each job, so all hand over in step 6.
JOBS = {
    "halves": ([4.0, 4.0, 3.0, 1.0, 4.0, 2.0], [2.0, 2.0, 2.0, 2.0, 1.0, 1.0]),
    "one is not finite": ([3.0, 3.0, 2.0, 2.0, 2.0, 2.0], [NAN] * 6),
    "one shows none": ([3.0, 3.0, 2.0, 2.0, 2.0, 2.0], [None] * 6),
}


def train(rank, losses, method):
    """Where the worker handed over, its rate in every step, and its parameters in the end."""
    torch.manual_seed(3)
    net = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2))
    model = DistributedDataParallel(net)
    base = torch.optim.SGD(model.parameters(), lr=0.1)
    hybrid = mkor.HybridSwitch(window=2, patience=1, smoothing=0.0)
    optimizer = getattr(mkor, method)(model, base, factor_update_steps=2, hybrid=hybrid)
    scheduler = mkor.KneePointLR(optimizer, window=2, dwell=2, decay=0.0)
    torch.manual_seed(rank)
    rates = []
    for step in range(STEPS):
        optimizer.zero_grad()
        model(torch.randn(6, 4)).square().mean().backward()
        loss = losses[rank][step if step < 6 else 4 + step % 2]
        if loss is not None:
            optimizer.observe_loss(torch.tensor(loss))
        optimizer.step()
        scheduler.step(NAN if loss is None else loss)
        rates.append(optimizer.param_groups[0]["lr"])
    weights = torch.cat([p.detach().flatten() for p in net.parameters()])
    return optimizer._engine.resting, rates, weights


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


def on_trial(rank, method):
    """The phase after every step, where workers measure other times than each other."""
    torch.manual_seed(3)
    model = DistributedDataParallel(nn.Linear(4, 2))
    base = torch.optim.SGD(model.parameters(), lr=0.1)
    clock = Clock()
    rule = {"window": 2, "patience": 1, "smoothing": 0.0, "threshold": 0.5, "trial": 2}
    hybrid = mkor.HybridSwitch(**rule, clock=clock)
    optimizer = getattr(mkor, method)(model, base, factor_update_steps=2, hybrid=hybrid)
    phases = []
    for step in range(10):
        # By worker 0 alone the method would go on, by worker 1 alone the base would take over.
        clock.now += 1.0 if step < 6 else (0.9, 0.1)[rank]
        optimizer.zero_grad()
        model(torch.randn(6, 4)).square().mean().backward()
        optimizer.observe_loss((1.0, 0.8, 0.76, 0.75, 0.73)[step // 2])
        optimizer.step()
        engine = optimizer._engine
        phases.append("base" if engine.resting else "trial" if engine.paused else "method")
    return phases


def worker(rank, jobs):
    if jobs is None:
        return [on_trial(rank, method) for method in ("MKOR", "KFAC", "HyLo")]
    return [train(rank, losses, method) for losses in jobs for method in ("MKOR", "KFAC")]


@pytest.mark.slow
def test_workers_agree_on_the_step(tmp_path):
    first, second = spawn(worker, tmp_path, list(JOBS.values()))
    for here, there in zip(first, second, strict=True):
        assert here[0] == there[0] == 6
        # Pair 3 has no fall: the knee is after step 6; then all pairs are flat.
        expected = [0.1] * 5 + [0.05] * 2 + [0.025] * 2 + [0.0125] * 2 + [0.00625]
        assert here[1] == there[1] == pytest.approx(expected)
        assert torch.equal(here[2], there[2])


@pytest.mark.slow
def test_workers_agree_on_the_end_of_a_trial(tmp_path):
    first, second = spawn(worker, tmp_path, None)
    assert first == second == [["method"] * 5 + ["trial"] * 4 + ["base"]] * 3
