"""The factors as torch.distributed.checkpoint saves and loads them, on any number of workers.

Workers hold the same factors, and gather a momentum that is spread over them, so one of them writes
all, in one piece: their shapes may differ
between the optimizer that saved them and the one that loads them, which a tensor's may not. What
workers have seen apart since the last exchange, such as losses of a window that runs, is averaged.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from mkor import checkpoint
from mkor.distributed import comm
from mkor.distributed.guard import during
from mkor.distributed.sharded import laid_out, whole
from mkor.engine import Engine
from mkor.handover import Handover
from mkor.meter import FIELDS, device_of


class Piece:
    """Data that is written and read as a whole."""

    def __init__(self, content: dict[str, Any]) -> None:
        """Keep the data."""
        self.content = content


class Factors:
    """The factors and counters of an optimizer; a `Stateful` of torch.distributed.checkpoint.

    torch's functions for optimizers keep only `state` and `param_groups`: give them the base.

        state = {
            "model": get_model_state_dict(model),
            "optimizer": get_optimizer_state_dict(model, optimizer.base),
            "factors": optimizer.factors,
        }
        dcp.save(state, checkpoint_id=path)
    """

    def __init__(self, engine: Engine, base: Optimizer, handover: Handover | None) -> None:
        """Of these parts of the optimizer."""
        self.engine = engine
        self.base = base
        self.handover = handover

    @during("gather the factors for a checkpoint, which all workers must save together")
    def state_dict(self) -> dict[str, Any]:
        """A copy in the memory of the host; all workers must call it."""
        packed = checkpoint.pack(self.engine, self.base, self.handover)
        # Gradients that are half accumulated are no part of a checkpoint of parameters either.
        packed["pending"] = {}
        device = device_of(self.engine.model.parameters())
        return {"piece": Piece(on_host(averaged(packed, device)))}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from what `state_dict` returned.

        Raises:
            ValueError: It is of another model or optimizer; nothing is changed then.
        """
        packed = copy.deepcopy(state_dict["piece"].content)
        checkpoint.load_factors(self.engine, self.base, packed, self.handover)
        for name, layer in self.engine.layers.items():
            buffers, view = self.engine.records[name].momentum, layer.view
            for key, parameter in (("weight", view.weight), ("bias", view.bias)):
                if key in buffers and parameter is not None:
                    buffers[key] = laid_out(buffers[key], parameter)


def averaged(packed: dict[str, Any], device: torch.device | None) -> dict[str, Any]:
    """Data in which what meters hold is the mean over workers, so that the sum stays what it is."""
    out = dict(packed)
    workers = comm.world_size()
    if workers > 1 and packed.keys() == set(FIELDS):
        own = torch.tensor([packed["total"], packed["finite"]], dtype=torch.float64, device=device)
        total, finite = (comm.all_reduce_sum(own) / workers).tolist()
        return out | {"total": total, "finite": finite}
    return {k: averaged(v, device) if isinstance(v, dict) else v for k, v in out.items()}


def on_host(value: Any) -> Any:
    """A nested copy of dicts and tensors, whose tensors are whole and on the CPU."""
    if isinstance(value, dict):
        return {key: on_host(entry) for key, entry in value.items()}
    return whole(value.detach()).to("cpu", copy=True) if isinstance(value, Tensor) else value
