"""Whether workers are built alike and still equal, so that none of them trains another model.

Both checks give every worker the same message. Workers that are built differently would wait for
each other, or add up what doesn't belong together; those that have drifted apart would go on.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import fields, is_dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from torch import Tensor, nn

from mkor.capture.discover import clean_name
from mkor.distributed import comm
from mkor.distributed.guard import during
from mkor.engine import Engine
from mkor.meter import device_of

ODD = 0x9E3779B1
"""What the bits of an entry are multiplied by, times its place: a sum that swaps don't leave."""

BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integers of the size of an entry."""


class Agreement:
    """The checks of one optimizer."""

    def __init__(self, engine: Engine, base: object, common: Mapping[str, Any]) -> None:
        """Of these parts of the optimizer; `common` are the options that all methods share."""
        self.engine = engine
        self.base = base
        self.common = common
        self.alike = False

    @during("compare how they are built and what they hold")
    def check(self, compare: bool) -> None:
        """Check once that workers are built alike, and every so often that they are equal.

        Args:
            compare: Whether they should be equal in this step.
        """
        if comm.world_size() == 1:
            return
        if not self.alike:
            lines = built_as(self.engine, self.base, self.common)
            check_built_alike(lines, device_of(self.engine.model.parameters()))
            self.alike = True
        every = self.common["agreement_steps"]
        if compare and every is not None and self.engine.index % every == 0:
            check_equal(self.engine, self.engine.index)


def built_as(engine: Engine, base: object, common: Mapping[str, Any]) -> list[str]:
    """What must be the same on all workers, a line each."""
    options = options_of(engine.method) | dict(common)
    own = {f"option {key}": value for key, value in options.items()}
    parameters = {
        f"parameter '{clean_name(name)}'": f"{tuple(p.shape)} in {p.dtype}"
        for name, p in engine.model.named_parameters()
    }
    layers = {f"layer '{name}'": layer.view.shape for name, layer in engine.layers.items()}
    known = {
        "mkor": installed("mkor"),
        "torch": torch.__version__,
        "base optimizer": type(base).__name__,
        **{key: told(value) for key, value in own.items()},
    }
    return [f"{key}: {value}" for key, value in {**known, **parameters, **layers}.items()]


def installed(package: str) -> str:
    """The version of a package; none is known of a source tree that isn't installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def options_of(method: object) -> dict[str, Any]:
    """The options of a method by name."""
    assert is_dataclass(method)
    return {entry.name: getattr(method, entry.name) for entry in fields(method)}


def told(value: object) -> str:
    """An option as text that is the same in every process, so without addresses."""
    if callable(value):
        return getattr(value, "__qualname__", "a function")
    return re.sub(r" at 0x[0-9a-f]+", "", repr(value))


def check_built_alike(lines: list[str], device: torch.device | None) -> None:
    """Raise on every worker if they are not built alike.

    Args:
        lines: What `built_as` tells of this worker.
        device: Where workers exchange it.
    """
    text = "\n".join(lines).encode()
    numbers = comm.all_gather_counts([zlib.crc32(text)], device)
    if all(number == numbers[0] for number in numbers):
        return
    own = torch.tensor(list(text), dtype=torch.uint8, device=device)
    lengths = [row[0] for row in comm.all_gather_counts([len(text)], device)]
    every = [bytes(part.tolist()).decode() for part in comm.all_gather_vectors(own, lengths)]
    first = every[0].splitlines()
    number, other = next((n, o.splitlines()) for n, o in enumerate(every) if o != every[0])
    here = next((line for line in first if line not in other), "nothing more")
    there = next((line for line in other if line not in first), "nothing more")
    raise RuntimeError(
        f"workers are built differently: worker 0 has '{here}' where worker {number} has "
        f"'{there}'. Build the model, the base and the optimizer alike, with the same versions"
    )


def check_equal(engine: Engine, step: int) -> None:
    """Raise on every worker if parameters, gradients or factors differ between them.

    Parameters that are spread over workers are left out: each holds a part of its own. So are
    factors of layers that are divided among workers; what they do to a gradient isn't. Waits for
    the device.
    """
    tensors = dict(replicated(engine.model))
    for name, record in engine.records.items() if not engine.ownership.divided else ():
        own = [*record.state.values(), *record.momentum.values()]
        kept = [tensor for tensor in own if not comm.is_sharded(tensor)]
        tensors[f"the factors of layer '{name}'"] = kept
    device = device_of(engine.model.parameters())
    sums = torch.stack([checksum(entry, device) for entry in tensors.values()])
    largest, smallest = comm.all_reduce_ends(sums)
    for name, differ in zip(tensors, (largest != smallest).tolist(), strict=True):
        if differ:
            raise RuntimeError(
                f"workers differ in step {step}: {name} is not the same on all of them. Gradients "
                "that no wrapper averages, random numbers and data-dependent code are usual causes"
            )


def replicated(model: nn.Module) -> Iterable[tuple[str, list[Tensor]]]:
    """Parameters and their gradients that all workers hold, by a phrase."""
    for path, parameter in model.named_parameters():
        if comm.is_sharded(parameter):
            continue
        name = clean_name(path)
        yield f"parameter '{name}'", [parameter]
        grad = parameter.grad
        yield f"the gradient of '{name}'", [] if grad is None else [grad.to_dense()]


def checksum(tensors: Iterable[Tensor], device: torch.device | None) -> Tensor:
    """A number that is equal for equal bits, and hardly for others; a scalar in int64."""
    total = torch.zeros((), dtype=torch.int64, device=device)
    for number, tensor in enumerate(tensors, start=1):
        flat = tensor.detach().contiguous().view(-1)
        bits = flat.view(BITS[flat.element_size()]).to(torch.int64)
        place = torch.arange(1, len(bits) + 1, device=bits.device) * ODD
        total = total + number * (bits * place).sum().to(total.device)
    return total
