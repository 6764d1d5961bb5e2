"""Drives a method the way the engine does on one worker, without a model."""

import torch

from mkor.messages import Exchange, Owned, Stacked
from mkor.methods.base import EVENTS, LayerShape, Moment, Rows, Seen, Sketch, Sums

__all__ = [
    "LayerShape",
    "Seen",
    "combined",
    "finish",
    "happened",
    "init",
    "random_seen",
    "run_update",
    "seen_of",
]


def init(method, shape, parameters=torch.float32):
    return method.init(shape, torch.device("cpu"), parameters)


def happened(state):
    """The events that happened, by name."""
    events = zip(EVENTS, state["events"].tolist(), strict=True)
    return {name: count for name, count in events if count}


def combined(message):
    """What one worker gets back for its own message."""
    if isinstance(message, Owned):
        return message.compute()
    if isinstance(message, Stacked):
        return message.function(message.state, message.given)
    assert isinstance(message, Exchange)
    return {**message.sum, **message.mean, **message.gather}


def finish(generator, message):
    """Answer a generator's messages until it returns; its result."""
    while True:
        try:
            message = generator.send(combined(message))
        except StopIteration as stop:
            return stop.value


def run_update(method, state, seen, again=None):
    """One update, and the second pass (of `again`, or the same) where there is one; the state."""
    generator = method.update(state, seen)
    state = finish(generator, next(generator))
    if method.second_pass:
        generator = method.revisit(state, seen if again is None else again)
        state = finish(generator, next(generator))
    return state


def random_seen(method, shape, rows=12, scale=1.0, dtype=torch.float32, generator=None):
    """A statistic of random rows, of the kind the method wants; the inputs' last column is 1."""
    options = {"dtype": dtype, "generator": generator}
    inputs = torch.randn(shape.stack, rows, shape.inputs, **options)
    inputs[..., -1] = 1
    grads = scale * torch.randn(shape.stack, rows, shape.outputs, **options) / max(rows, 1)
    weight = torch.randn(shape.stack, shape.outputs, shape.inputs, **options)
    return seen_of(method, shape, inputs, grads, weight)


def seen_of(method, shape, inputs, grads, weight=None):
    """What the capture would show of rows a [G, n, i] and g [G, n, o]."""
    rows = inputs.shape[1]
    count = inputs.new_full((1,), rows)
    gradient = grads.mT @ inputs
    shown = gradient[..., ::2].sum(dim=-1) if method.absolute() else None
    own = {"shown": shown, "true": shown, "weight": weight if method.second_pass else None}
    norm = torch.zeros(())
    of_inputs, of_grads = method.wants(shape)
    if isinstance(of_inputs, Rows):
        kept = {"inputs": inputs, "grads": grads}
        kept = of_inputs.compress(inputs, grads, 5) if of_inputs.compress else kept
        inputs, grads = kept.pop("inputs"), kept.pop("grads")
        return Seen(inputs, grads, count, norm, False, kept=kept, **own)
    if isinstance(of_inputs, Sketch):
        source = torch.Generator().manual_seed(rows)
        signs = [
            torch.randint(2, (of_inputs.vectors, rows), generator=source).to(inputs) * 2 - 1
            for _ in range(2)
        ]
        return Seen(signs[0] @ inputs, signs[1] @ grads, count, norm, False, samples=count, **own)
    if isinstance(of_inputs, Moment):
        own |= {"samples": count, "input_sums": inputs.sum(dim=1)}
        inputs = inputs.mT @ inputs if of_inputs.matrix else inputs[:, :0, :0]
    else:
        inputs, count = block_sums(inputs, of_inputs.blocks)
    if isinstance(of_grads, Sums):
        grads, _ = block_sums(grads, of_grads.blocks)
    else:
        grads = grads.mT @ grads if of_grads.matrix else grads[:, :0]
    return Seen(inputs, grads, count, norm, False, **own)


def block_sums(rows, blocks):
    """Sums of rows [G, n, d] in blocks, [G, r, d], and the rows of each."""
    parts = torch.tensor_split(rows, blocks, dim=1)
    counts = torch.tensor([part.shape[1] for part in parts], dtype=rows.dtype)
    return torch.stack([part.sum(dim=1) for part in parts], dim=1), counts
