"""Runs the generators of several workers in lock-step, as the engine does over a network."""

import torch

from mkor.messages import Owned


def together(generators):
    """Answer each round of messages with sums and means over the workers; their results."""
    messages = [next(generator) for generator in generators]
    while True:
        one = messages[0]
        answers = one.compute() if isinstance(one, Owned) else combined(messages)
        messages, results = [], []
        for generator in generators:
            try:
                copies = {key: tensor.clone() for key, tensor in answers.items()}
                messages.append(generator.send(copies))
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
