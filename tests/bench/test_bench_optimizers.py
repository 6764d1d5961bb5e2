"""The registry, the schedule and the measurement of time."""

import pytest
import torch

from mkor_bench.optimizers import OPTIMIZERS, optimizer_row
from mkor_bench.tasks.source import TaskSource
from mkor_bench.timing import TURN, TimingJob, rounds_for, time_steps
from mkor_bench.train import Settings, Training, train, warmup_cosine


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_of_the_registry_trains(name, tiny):
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
