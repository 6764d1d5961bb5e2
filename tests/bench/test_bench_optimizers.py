"""The registry, the schedule and the measurement of time."""

import pytest
import torch

from mkor_bench.errors import UserError
from mkor_bench.optimizers import OPTIMIZERS, optimizer_row
from mkor_bench.options import parse_optimizers
from mkor_bench.tasks.source import TaskSource
from mkor_bench.timing import TURN, TimingJob, rounds_for, time_steps
from mkor_bench.train import Settings, Training, train, warmup_cosine

NEEDS = {"soap": "pytorch_optimizer"}


@pytest.mark.parametrize("name", [*OPTIMIZERS, "kfac:damping=0.1:inverse_update_steps=20"])
def test_an_optimizer_of_the_registry_trains(name, tiny):
    if name in NEEDS:
        pytest.importorskip(NEEDS[name])
    row = optimizer_row(name)
    assert row.name == name and row.description
    task = TaskSource(f"{tiny}:task").load()
    training = Training(task, Settings(name, 0.05, seed=0, steps=60))
    assert isinstance(training.optimizer, torch.optim.Optimizer)
    assert training.optimizer.param_groups[0]["lr"] < 0.05  # warm-up has begun
    run = train(training)
    assert sum(run.losses[-5:]) < sum(run.losses[:5])


def test_the_schedule_warms_up_and_ends_near_zero():
    factors = [warmup_cosine(100)(step) for step in range(100)]
    assert factors[:10] == pytest.approx([0.1 * step for step in range(1, 11)])
    assert factors[10:] == sorted(factors[10:], reverse=True)
    assert 0 < factors[-1] < 0.01
    assert warmup_cosine(1)(0) == 1


def test_times_are_relative_to_sgd_even_where_it_is_not_compared(tiny):
    job = TimingJob(TaskSource(f"{tiny}:task"), ("adamw",), rounds=rounds_for(10))
    reported = []
    times = time_steps(job, reported.append)
    assert list(times) == ["adamw"]
    assert times["adamw"].seconds > 0 and times["adamw"].ratio > 0
    assert sum(reported) == job.steps == 2 * TURN * (3 + 1)


def test_options_in_a_name_reach_the_optimizer():
    row = optimizer_row("mkor-lowrank:damping=0.25:rank=3:statistic=mean:vectors=1")
    assert row.description == (
        "MKOR with low-rank sketches on SGD with momentum 0.9 "
        "with damping 0.25, rank 3, statistic mean, vectors 1"
    )
    optimizer = row.build(torch.nn.Linear(4, 4), 0.1)
    assert (optimizer._method.damping, optimizer._method.vectors) == (0.25, 1)


MISTAKEN_OPTIONS = {
    "sgdx:momentum=0": "unknown optimizer 'sgdx': did you mean 'sgd'",
    "sgd:momentum": "optimizer 'sgd:momentum': 'momentum' is not an option: write name:option=va",
    "sgd:=3": "'=3' is not an option",
    "sgd:momentums=0": "optimizer 'sgd:momentums=0': SGD.__init__() got an unexpected keyword",
    "mkor:pakced=True": "unknown option of mkor 'pakced': did you mean 'packed'",
    "kfac:packed=True": "unknown option of kfac 'packed': choose from agreement_steps, ",
    "mkor:damping=-1": "optimizer 'mkor:damping=-1': damping=-1 is out of range",
}


@pytest.mark.parametrize("name", MISTAKEN_OPTIONS)
def test_a_mistaken_option_is_told_at_once(name):
    with pytest.raises(UserError) as raised:
        parse_optimizers(f"adamw,{name}")
    assert MISTAKEN_OPTIONS[name] in str(raised.value)
