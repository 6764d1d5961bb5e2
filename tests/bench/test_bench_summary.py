"""What is read off the curves, on curves that can be checked by hand."""

import math

import pytest

from mkor_bench.summary import (
    OptimizerResult,
    TaskResult,
    final_loss,
    mean_and_spread,
    mean_curve,
    smooth,
    window,
)
from mkor_bench.train import Run, Settings


def run(losses, metric=0.5, seed=0):
    seconds = [0.1 * (step + 1) for step in range(len(losses))]
    return Run(Settings("sgd", 0.1, seed, steps=len(losses)), losses, seconds, metric)


def result(name, *curves):
    return OptimizerResult(name, {0.01: 3.0, 0.1: 1.0, 1.0: 2.0}, {0.1: [run(c) for c in curves]})


def test_window_is_a_twentieth():
    assert [window(n) for n in (1, 10, 100, 1000)] == [1, 1, 5, 50]


def test_smooth_averages_with_what_came_before():
    assert smooth([4, 2, 6, 0], 2) == [4, 3, 4, 3]
    assert smooth([4, 2], 5) == [4, 3]


def test_smooth_forgets_a_huge_loss():
    assert smooth([1e30, 1.0, 1.0, 1.0], 2)[2:] == [1, 1]
    assert math.isnan(smooth([1.0, math.nan], 2)[1])


def test_final_loss_averages_the_last_steps():
    assert final_loss(run([9.0] * 38 + [1.0, 3.0])) == 2
    assert final_loss(run([1.0, math.nan])) == math.inf
    assert final_loss(run([])) == math.inf


def test_mean_and_spread():
    assert mean_and_spread([1.0, 3.0]) == (2.0, pytest.approx(math.sqrt(2)))
    assert mean_and_spread([4.0]) == (4.0, 0.0)
    mean, spread = mean_and_spread([1.0, math.inf])
    assert mean == math.inf and math.isnan(spread)


def test_mean_curve_ends_with_the_shortest():
    assert mean_curve([[1, 2, 3], [3, 4]]) == [2, 3]


def test_the_best_learning_rate_and_the_edge():
    grid = {0.01: 3.0, 0.1: 1.0, 1.0: 2.0, 10.0: math.inf}
    steady, brittle = [run([2.0]), run([2.0])], [run([1.0]), run([9.0])]
    chosen = OptimizerResult("sgd", grid, {0.1: brittle, 1.0: steady})
    assert chosen.best_of_grid(2) == [0.1, 1.0]
    assert chosen.best_of_grid(9) == [0.1, 1.0, 0.01]
    assert (chosen.lr, chosen.runs, chosen.lr_at_edge) == (1.0, steady, False)
    edge = OptimizerResult("sgd", {0.1: 1.0, 1.0: 2.0}, {0.1: steady})
    assert edge.lr_at_edge
    assert not OptimizerResult("sgd", {0.1: 1.0}, {0.1: steady}).lr_at_edge
    none = OptimizerResult("sgd", {0.1: math.inf, 1.0: math.inf})
    assert none.best_of_grid(2) == []
    assert none.lr is None and none.runs == [] and not none.lr_at_edge


def test_reach_counts_steps_from_one():
    falling = result("mkor", [4.0, 3.0, 2.0, 1.0], [4.0, 3.0, 2.0, 1.0])
    assert falling.reach(3.0) == (2, pytest.approx(0.2))
    assert falling.reach(0.5) is None
    assert OptimizerResult("mkor", {0.1: math.inf}).reach(3.0) is None


def test_the_target_is_the_best_first_order_loss_and_reached_by_its_owner():
    sgd, adamw = result("sgd", [4.0, 3.0, 2.5]), result("adamw", [5.0, 4.0, 3.0])
    mkor = result("mkor", [2.0, 1.0, 0.5])
    of_task = TaskResult(None, 3, [adamw, sgd, mkor])
    assert of_task.target is sgd
    assert of_task.reach(sgd) == (3, pytest.approx(0.3))
    assert of_task.reach(adamw) is None
    assert of_task.reach(mkor)[0] == 1


def test_without_a_first_order_optimizer_there_is_no_target():
    of_task = TaskResult(None, 3, [result("mkor", [2.0, 1.0, 0.5])])
    assert of_task.target is None
    assert of_task.reach(of_task.optimizers[0]) is None
