"""One trial of a user's task, so that its mistakes show before any work begins."""

from __future__ import annotations

import math

import torch

from mkor_bench.errors import UserError
from mkor_bench.tasks.fields import expect
from mkor_bench.tasks.guard import NUMERICAL, call, failure
from mkor_bench.tasks.source import TaskSource


def check_task(source: TaskSource) -> None:
    """Builds a user's model once, and takes its loss, gradient and test metric.

    Built-in tasks have tests of their own and are not tried.

    Args:
        source: Where the task comes from.

    Raises:
        UserError: A function of the task raises, or returns what it should not.
    """
    if not source.is_users:
        return
    task, path = source.load(), source.path
    torch.manual_seed(0)
    model = task.build(0)
    try:
        batch = next(task.batches(0))
    except StopIteration:
        raise UserError(
            f"task {task.name!r}: its batches ended before the first: make them endless."
        ) from None
    try:
        loss = task.loss(model, batch)
    except NUMERICAL as error:
        raise failure(task, path, "loss", error) from error
    expect(math.isfinite(loss.item()), task, "loss must be finite on a new model", loss.item())
    call(task, path, "gradient", loss.backward)
    with torch.no_grad():
        task.evaluate(model.eval())
