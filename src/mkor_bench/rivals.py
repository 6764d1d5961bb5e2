"""Optimizers of others that MKOR is compared with: SOAP, and Muon as it is commonly used.

Both are optional: a clear message names what is missing where they are asked for.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim import AdamW, Optimizer

from mkor_bench.errors import UserError

ADAMW_SHARE = 0.1
"""AdamW's learning rate beside Muon, relative to Muon's.

An update of AdamW has a root-mean-square near 1, one of Muon near 1/√(longer side), which is 0.03
to 0.1 at the widths of the tasks: so both move their parameters about as far.
"""


def build_soap(model: nn.Module, lr: float, **options: Any) -> Optimizer:
    """Makes SOAP with the defaults of the package pytorch_optimizer.

    Args:
        model: The model; all of its parameters are trained.
        lr: The learning rate.
        **options: Others of its options.

    Returns:
        The optimizer.

    Raises:
        UserError: The package is not installed.
    """
    try:
        from pytorch_optimizer import SOAP
    except ImportError:
        raise UserError(
            "optimizer 'soap' needs the package pytorch_optimizer: "
            "pip install pytorch_optimizer, or leave soap out of --optimizers."
        ) from None
    made: Optimizer = SOAP(model.parameters(), lr=lr, **options)
    return made


def build_muon(
    model: nn.Module, lr: float, adamw_share: float = ADAMW_SHARE, **options: Any
) -> Optimizer:
    """Makes ``torch.optim.Muon`` on the hidden matrices, and AdamW on the rest.

    Args:
        model: The model.
        lr: Muon's learning rate.
        adamw_share: AdamW's learning rate relative to it.
        **options: Others of Muon's options.

    Returns:
        Both as one optimizer.

    Raises:
        UserError: This torch has no Muon.
    """
    if not hasattr(torch.optim, "Muon"):
        raise UserError(
            f"optimizer 'muon' needs torch 2.9 or later, this is {torch.__version__}: "
            "upgrade torch, or leave muon out of --optimizers."
        )
    weights = hidden_weights(model)
    matrices = Matrices(weights)
    hidden = {id(weight) for weight in weights}
    rest = [parameter for parameter in model.parameters() if id(parameter) not in hidden]
    parts: list[Optimizer] = [AdamW(rest, lr=adamw_share * lr)]
    if weights:
        parts.insert(0, torch.optim.Muon(matrices.flat, lr=lr, **options))
    return Together(parts, list(model.parameters()), matrices.take_gradients)


def hidden_weights(model: nn.Module) -> list[nn.Parameter]:
    """Finds the weights that Muon is meant for.

    Args:
        model: The model.

    Returns:
        The weights of linear and convolutional layers, without the last such layer (the head) and
        without those that an embedding shares.
    """
    layers = [
        module
        for module in model.modules()
        if isinstance(module, (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d))
    ]
    tables = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    unique = {id(layer.weight): layer.weight for layer in layers[:-1]}
    return [weight for key, weight in unique.items() if key not in tables and weight.requires_grad]


class Matrices:
    """Weights seen as matrices, one row an output channel, in the same memory.

    ``torch.optim.Muon`` takes matrices alone; a convolution's weight is one as Muon's authors see
    it, with all but the first dimension as one.

    Args:
        weights: Parameters of two or more dimensions.
    """

    def __init__(self, weights: list[nn.Parameter]) -> None:
        self.weights = weights
        # view and not flatten: it refuses a layout that it could only copy.
        self.flat = [nn.Parameter(weight.detach().view(len(weight), -1)) for weight in weights]

    def take_gradients(self) -> None:
        """Gives each matrix the gradient of its weight."""
        for flat, weight in zip(self.flat, self.weights, strict=True):
            flat.grad = None if weight.grad is None else weight.grad.flatten(1)


class Together(Optimizer):
    """Several optimizers of disjoint parameters as one, so that one scheduler moves them all.

    Args:
        parts: The optimizers.
        parameters: What ``zero_grad`` clears: the model's own parameters.
        before_step: Called before they step.
    """

    def __init__(
        self,
        parts: list[Optimizer],
        parameters: list[nn.Parameter],
        before_step: Callable[[], None],
    ) -> None:
        self._parts = parts
        self._parameters = parameters
        self._before_step = before_step
        super().__init__([group for part in parts for group in part.param_groups], {})
        self._share_groups()

    def step(self, closure: Any = None) -> Any:
        """Evaluates the closure, if there is one, and steps every part; returns its loss."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._before_step()
        for part in self._parts:
            part.step()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clears the gradients of the model's parameters."""
        for parameter in self._parameters:
            if set_to_none:
                parameter.grad = None
            elif parameter.grad is not None:
                parameter.grad.zero_()

    def state_dict(self) -> dict[str, Any]:
        """Returns the states of the parts."""
        return {"parts": [part.state_dict() for part in self._parts]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads what :meth:`state_dict` returned."""
        for part, state in zip(self._parts, state_dict["parts"], strict=True):
            part.load_state_dict(state)
        self._share_groups()

    def _share_groups(self) -> None:
        # The parts' own dictionaries: what a scheduler sets is what the parts read.
        self.param_groups = [group for part in self._parts for group in part.param_groups]
