"""Run a pure function once for all layers that ask for it with tensors of equal shape.

An update of small factors costs its calls, not their arithmetic: some thirty operations a side, in
every layer. Layers whose tensors have the same shapes are stacked along G and take one round of
them together. Wide tensors would cost more to copy than that saves.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable

import torch

from mkor.messages import Stacked, Tensors

WIDE = 2**17
"""Entries of one layer's tensors from which on it is left alone."""


def run_stacked(requests: dict[str, Stacked]) -> dict[str, Tensors]:
    """Answer the requests of several layers, those that are alike together."""
    alike: dict[Hashable, list[str]] = defaultdict(list)
    for name, request in requests.items():
        alike[kind_of(request, name)].append(name)
    answers: dict[str, Tensors] = {}
    for names in alike.values():
        answers |= run_alike({name: requests[name] for name in names})
    return answers


def kind_of(request: Stacked, name: str) -> Hashable:
    """What requests that may run together have in common."""
    tensors = [*request.state.items(), *request.given.items()]
    if sum(tensor.numel() for _, tensor in tensors) > WIDE:
        return name
    kinds = ((key, t.shape[1:], t.dtype, t.device) for key, t in tensors)
    return (request.function, *kinds)


def run_alike(requests: dict[str, Stacked]) -> dict[str, Tensors]:
    """One call for requests with the same function and shapes."""
    names = list(requests)
    first = requests[names[0]]
    if len(names) == 1:
        return {names[0]: first.function(first.state, first.given)}
    states = [request.state for request in requests.values()]
    state, given = (
        {key: torch.cat([part[key] for part in parts]) for key in parts[0]}
        for parts in (states, [request.given for request in requests.values()])
    )
    out = first.function(state, given)
    lengths = [len(next(iter(part.values()))) for part in states]
    for key, tensor in state.items():
        torch._foreach_copy_([own[key] for own in states], tensor.split(lengths))
    parts = {key: tensor.split(lengths) for key, tensor in out.items()}
    return {name: {key: part[i] for key, part in parts.items()} for i, name in enumerate(names)}
