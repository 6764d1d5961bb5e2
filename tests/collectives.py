"""Counts what the collectives of torch.distributed return, by wrapping them."""

from contextlib import contextmanager
from unittest import mock

import torch
import torch.distributed as dist

NAMES = (
    *("all_reduce", "reduce", "broadcast", "reduce_scatter", "reduce_scatter_tensor"),
    *("all_gather", "all_gather_into_tensor", "all_to_all", "all_to_all_single"),
    *("all_gather_object", "broadcast_object_list", "gather", "scatter", "send", "recv"),
)


def size_of(result):
    tensors = result if isinstance(result, list) else [result]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


@contextmanager
def counted():
    """Yields a list that fills with (name of the collective, bytes of its result)."""
    calls = []

    def wrapped(name, function):
        def call(first, *args, **kwargs):
            assert isinstance(first, (torch.Tensor, list)), name
            calls.append((name, size_of(first)))
            return function(first, *args, **kwargs)

        return call

    with mock.patch.multiple(dist, **{n: wrapped(n, getattr(dist, n)) for n in NAMES}):
        yield calls
