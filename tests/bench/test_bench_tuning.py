"""Tuning asks for exactly the runs that it needs, and finds the best."""

import math

import pytest

from mkor_bench.studies.tuning import HIGHEST, LOWEST, Candidate, place, rate, tune

GRID = (-6, -5, -4, -3, -2)


def tuned(candidate, loss, grid=GRID):
    """Runs what tuning asks for until it is done; returns the outcome and the rounds."""
    known, rounds = {}, []
    while True:
        tuning = tune(candidate, grid, lambda name, lr, known=known: known.get((name, lr)))
        assert set(tuning.missing) <= set(tuning.points)
        if not tuning.missing:
            assert set(tuning.points) == set(known)
            return tuning, rounds
        assert tuning.best is None
        rounds.append(list(tuning.missing))
        known |= {point: loss(*point) for point in tuning.missing}


def bowl(best):
    return lambda name, lr: abs(math.log10(lr) - math.log10(best))


def test_rates_are_one_and_three_times_powers_of_ten():
    assert [rate(place) for place in range(-4, 4)] == [0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30]
    assert (rate(LOWEST), rate(HIGHEST)) == (1e-7, 100)


def test_the_place_of_a_rate_is_the_one_that_it_came_from():
    assert [place(rate(at)) for at in range(LOWEST, HIGHEST + 1)] == [*range(LOWEST, HIGHEST + 1)]
    assert [place(lr) for lr in (0.002, 0.0999999, 5.0)] == [None] * 3


def test_a_best_rate_inside_the_grid_takes_one_round():
    tuning, rounds = tuned(Candidate("sgd"), bowl(0.01))
    assert tuning.best == ("sgd", 0.01)
    assert [[lr for _, lr in points] for points in rounds] == [[0.001, 0.003, 0.01, 0.03, 0.1]]


@pytest.mark.parametrize(
    ("best", "added"), [(1.0, [0.3, 1.0, 3.0]), (1e-4, [3e-4, 1e-4, 3e-5]), (0.1, [0.3])]
)
def test_a_best_rate_at_the_edge_widens_the_grid(best, added):
    tuning, rounds = tuned(Candidate("sgd"), bowl(best))
    assert tuning.best == ("sgd", best)
    assert [lr for points in rounds[1:] for _, lr in points] == added


def test_rates_go_down_while_all_diverge():
    tuning, _ = tuned(Candidate("sgd"), lambda name, lr: lr if lr < 1e-4 else math.inf)
    assert tuning.best == ("sgd", rate(LOWEST))
    tuning, rounds = tuned(Candidate("sgd"), lambda name, lr: math.inf)
    assert tuning.best is None and not tuning.missing
    assert rounds[-1] == [("sgd", rate(LOWEST))]


def test_options_are_searched_one_after_the_other():
    losses = {
        "kfac": 5.0,
        "kfac:damping=0.1": 3.0,
        "kfac:damping=1": 4.0,
        "kfac:damping=0.1:every=5": 2.0,
    }

    def loss(name, lr):
        # A higher damping wants a rate ten times as high, which the neighbours lead to.
        best = 1.0 if "damping=0.1" in name else 0.1
        return losses[name] + bowl(best)(name, lr)

    candidate = Candidate("kfac", {"damping": (0.1, 1), "every": (5,)})
    tuning, rounds = tuned(candidate, loss)
    assert tuning.best == ("kfac:damping=0.1:every=5", 1.0)
    assert {name for points in rounds for name, _ in points} == set(losses)


def test_options_that_gain_nothing_leave_the_name():
    candidate = Candidate("kfac", {"damping": (0.1,)})
    tuning, _ = tuned(candidate, lambda name, lr: bowl(0.01)(name, lr) + (":" in name))
    assert tuning.best == ("kfac", 0.01)
