"""What goes wrong in a step without ending the training: told once, and in the log of the run."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from mkor.capture.discover import Layer
from mkor.distributed import comm
from mkor.distributed.sharded import local
from mkor.methods.base import Seen
from mkor.warn import warn

LOG = logging.getLogger("mkor")


class Faults:
    """Warnings of one optimizer, each given once, and the counts that the log has told."""

    def __init__(self) -> None:
        """Nothing told yet."""
        self.told: set[str] = set()
        self.counts: dict[str, dict[str, int]] = {}

    def silent(self, names: Iterable[str], step: int) -> None:
        """Warn of layers that train but never showed a statistic."""
        new = [name for name in names if name not in self.told]
        if new:
            self.told.update(new)
            listed = ", ".join(new)
            LOG.warning("no statistics: step=%d layers=%s", step, listed)
            self.once(
                f"no statistics arrived for {listed}: the layer keeps training by the base "
                "optimizer alone. Its module was not called through __call__ (model code may call "
                ".forward or use the weight directly), or its gradient is one that "
                "torch.autograd.grad returned, or the model was compiled before the optimizer was "
                "built or a hybrid switch went back: compile it again, or set "
                "torch._dynamo.config.skip_nnmodule_hook_guards = False before. The output "
                "projection of an attention module shows nothing inside a compiled graph"
            )

    def once(self, text: str) -> None:
        """Warn, but not of the same thing again."""
        if text not in self.told:
            self.told.add(text)
            warn(text)

    def report(self, counts: dict[str, dict[str, int]], step: int) -> None:
        """Log what has been counted since the last time, a line a layer.

        Args:
            counts: Faults by layer and kind; fewer than before where factors began anew.
            step: Number of steps so far.
        """
        for name, now in counts.items():
            before = self.counts.get(name, {})
            new = {key: n - b if n >= (b := before.get(key, 0)) else n for key, n in now.items()}
            if any(new.values()):
                told = " ".join(f"{key}={count}" for key, count in new.items())
                LOG.warning("fault: step=%d layer=%s %s", step, name, told)
        self.counts = counts


def refuse_nonfinite(layers: Mapping[str, Layer], seen: Mapping[str, Seen], step: int) -> None:
    """Raise on every worker, before anything changes, if a statistic or gradient isn't finite.

    Workers tell each other, so that none waits for one that stopped; all wait for their devices.
    """
    names = list(layers)
    faults = [broken(layers[name], seen.get(name)) for name in names]
    flags = comm.all_reduce_sum(torch.stack([fault.to(faults[0]) for fault in faults]))
    for name, fault in zip(names, flags.tolist(), strict=True):
        if fault:
            LOG.error("not finite: step=%d layer=%s", step, name)
            raise FloatingPointError(
                f"layer '{name}' has a statistic or gradient that is not finite in step {step}; "
                "nothing was changed (on_nonfinite='raise'). Call zero_grad() and go on with the "
                "next batch"
            )


def broken(layer: Layer, seen: Seen | None) -> Tensor:
    """1 where a statistic or gradient of a layer isn't finite on this worker, else 0."""
    tensors = [] if seen is None else [seen.inputs, seen.grads]
    grad = layer.view.gradient()
    if grad is not None:
        tensors.append(local(grad))
    device = layer.view.weight.device
    finite = [torch.isfinite(tensor).all() for tensor in tensors]
    sound = torch.stack(finite).all() if finite else torch.ones((), device=device)
    return 1 - sound.float()
