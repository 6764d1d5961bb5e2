"""Drives a method the way the engine does on one worker, without a model."""

import torch

from mkor.methods.base import Exchange, LayerShape, Seen

__all__ = ["LayerShape", "Seen", "combined", "finish", "init", "random_seen", "run_update"]


def init(method, shape, parameters=torch.float32):
    return method.init(shape, torch.device("cpu"), parameters)


def combined(message):
    """What one worker gets back for its own message."""
    assert isinstance(message, Exchange)
    return {**message.sum, **message.mean, **message.gather}


def finish(generator, message):
    """Answer a generator's messages until it returns; its result."""
    while True:
        try:
            message = generator.send(combined(message))
        except StopIteration as stop:
            return stop.value


def run_update(method, state, seen):
    """One update; the new state."""
    generator = method.update(state, seen)
    return finish(generator, next(generator))


def random_seen(shape, vectors, rows=12, scale=1.0, dtype=torch.float32, generator=None):
    """A statistic of `rows` random rows in `vectors` blocks, the last column of the inputs ones."""
    counts = [rows // vectors + (j < rows % vectors) for j in range(vectors)]
    inputs = torch.randn(shape.stack, vectors, shape.inputs, dtype=dtype, generator=generator)
    grads = torch.randn(shape.stack, vectors, shape.outputs, dtype=dtype, generator=generator)
    counts = torch.tensor(counts, dtype=dtype)
    inputs[..., -1] = counts
    return Seen(inputs, scale * grads / rows, counts, torch.zeros(()), grads_reduced=False)
