"""When factors are updated."""

import pytest

from mkor.schedule import UpdateSchedule


@pytest.mark.parametrize(
    ("every", "warmup", "expected"),
    [
        (1, 0, list(range(12))),
        (5, 0, [0, 5, 10]),
        (5, 3, [0, 1, 2, 5, 10]),
        (5, 6, [0, 1, 2, 3, 4, 5, 10]),
        (4, 100, list(range(12))),
        (100, 0, [0]),
    ],
)
def test_due_steps(every, warmup, expected):
    schedule = UpdateSchedule(every, warmup)
    assert [step for step in range(12) if schedule.due(step)] == expected


def test_the_first_step_always_updates():
    assert all(UpdateSchedule(every, 0).due(0) for every in (1, 2, 10, 1000))
