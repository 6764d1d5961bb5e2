"""Runs the generators of several workers in lock-step, as the engine does over a network."""

import torch

from mkor.messages import Owned, Stacked


def together(generators):
    """Answer each round of messages with sums and means over the workers; their results."""
    messages = [next(generator) for generator in generators]
    while True:
        one = messages[0]
        if isinstance(one, Stacked):
            answers = [message.function(message.state, message.given) for message in messages]
        else:
            shared = one.compute() if isinstance(one, Owned) else combined(messages)
            answers = [{key: t.clone() for key, t in shared.items()} for _ in generators]
        messages, results = [], []
        for generator, answer in zip(generators, answers, strict=True):
            try:
                messages.append(generator.send(answer))
            except StopIteration as stop:
                results.append(stop.value)
        if results:
            assert not messages, "workers ended in different rounds"
            return results


def combined(messages):
    """Sums and means over the workers."""
    answers = {key: sum(m.sum[key] for m in messages) for key in messages[0].sum}
    for key in messages[0].mean:
        answers[key] = torch.stack([m.mean[key] for m in messages]).mean(dim=0)
    return answers
