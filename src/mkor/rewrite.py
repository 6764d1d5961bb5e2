"""Rewrite the gradients of layers: precondition, then rescale.

A gradient that is spread over workers is rewritten block by block where the method can do that: all
layers run together, so that a round of theirs costs one collective for the same workers. Otherwise
it is gathered, a layer at a time, and each worker keeps its block of the result.

Where layers are divided among workers, each rewrites the gradients of those that it holds, and the
results of all cross in one collective.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from mkor.blocks import Block, Blockwise, Shares, counted
from mkor.capture.blank import blank_matrix
from mkor.capture.views import View
from mkor.distributed.guard import during
from mkor.linalg import norm_of, subtract_product_
from mkor.methods.base import Method, State
from mkor.ownership import Ownership
from mkor.rescale import SIZED, Factor, Sides, kl_factor, rescale_, rescaled
from mkor.synchronise import exchange_shares, run_together

Rates = dict[int, Any]


@dataclass(frozen=True)
class Rewriter:
    """A method, and how what it makes of a gradient is scaled.

    Attributes:
        method: The method in this step.
        factor: Gives the result its size.
        clip: The bound κ on the sum of products, or None.
        ownership: Who holds which layer.
    """

    method: Method
    factor: Factor
    clip: float | None
    ownership: Ownership

    @during("exchange what preconditions the gradients of a step")
    def rewrite(self, views: dict[str, View], states: dict[str, State], rates: Rates) -> None:
        """Rewrite the gradients of the layers that have a dense one.

        Args:
            views: The layers that have factors.
            states: Their factors.
            rates: Learning rates by the `id` of the parameter; only `clip` needs them.
        """
        ready = {name: view for name, view in views.items() if view.gradient() is not None}
        if self.ownership.divided:
            products = self.rewrite_divided(views, states)
        else:
            products = self.rewrite_all(ready, states)
        if self.clip is not None and products:
            parts = [products[name] * rates[id(view.weight)] ** 2 for name, view in ready.items()]
            factor = kl_factor(torch.stack([part.to(parts[0]) for part in parts]), self.clip)
            for view in ready.values():
                view.scale(factor.to(view.weight.device))

    def rewrite_all(self, views: dict[str, View], states: dict[str, State]) -> dict[str, Tensor]:
        """Rewrite every gradient here; its product with the result, by layer."""
        blocks = {name: view.block() for name, view in views.items() if view.scattered}
        products: dict[str, Tensor] = {}
        together: dict[str, Blockwise] = {}
        for name, view in views.items():
            block = blocks.get(name) if self.method.blockwise else None
            if self.clip is None and self.rewrite_in_place(view, states[name]):
                continue
            if block is None:
                grad = view.matrix()  # [G, o, i]
                products[name] = self.write(view, self.improve(view, states[name], grad), grad)
            else:
                together[name] = self.rewrite_block(view, states[name], block)
        groups = {name: views[name].block_groups() for name in together}
        return products | run_together(together, partial(exchange_shares, groups=groups))

    def rewrite_in_place(self, view: View, state: State) -> bool:
        """Rewrite a gradient where it lies, if the method can; whether it was done."""
        pieces = view.columns()
        found = None if pieces is None else self.method.correction(state, pieces)
        if pieces is None or found is None:
            return False
        before = None if self.factor in SIZED.values() else norm_of(pieces)
        subtract_product_(pieces, *found)
        rescale_(pieces, self.factor, sides(view), before)
        return True

    def rewrite_divided(
        self, views: dict[str, View], states: dict[str, State]
    ) -> dict[str, Tensor]:
        """Rewrite the gradients of the layers held here, and take the others' from their holders.

        What crosses is of all layers, with a gradient or not, so that it fits together.
        """
        grads = {
            name: blank_matrix(view) if view.gradient() is None else view.matrix()
            for name, view in views.items()
        }
        own = dict(grads)
        for name in filter(self.ownership.holds, views):
            own[name] = self.improve(views[name], states[name], grads[name])
        return {
            name: self.write(views[name], update, grads[name])
            for name, update in self.ownership.complete(own).items()
            if views[name].gradient() is not None
        }

    def improve(self, view: View, state: State, grad: Tensor) -> Tensor:
        """A gradient [G, o, i] preconditioned and rescaled."""
        update = self.method.precondition(state, grad).to(grad.dtype)
        return rescaled(view.present(update), grad, self.factor, sides(view))

    def write(self, view: View, update: Tensor, grad: Tensor) -> Tensor:
        """Write the result; its product with the gradient, if that is needed, else nothing."""
        product = self.product(update, grad)
        view.write(update)  # which may be what `grad` is a view of
        return product

    def rewrite_block(self, view: View, state: State, block: Block) -> Blockwise:
        """The same of this worker's block."""
        grad = view.matrix(block)  # [1, o', i']
        update = yield from self.method.precondition_block(state, grad, block)
        update = view.present(update.to(grad.dtype))
        squares = [counted(tensor, block).square().sum() for tensor in (update, grad)]
        sizes = (yield Shares(both={"squares": torch.stack(squares)}))["squares"].sqrt()
        norms = (sizes[0].view(1, 1, 1), sizes[1].view(1, 1, 1))
        update = rescaled(update, grad, self.factor, sides(view), norms)
        product = self.product(counted(update, block), grad)
        view.write(update, block)
        shared = yield Shares(both={} if self.clip is None else {"product": product})
        return shared.get("product", product)

    def product(self, update: Tensor, grad: Tensor) -> Tensor:
        """⟨V, ∇⟩, if there is a bound on it; else nothing."""
        if self.clip is None:
            return grad.new_empty(0)
        return torch.dot(update.flatten(), grad.flatten())


def sides(view: View) -> Sides:
    """Numbers of outputs and inputs of each matrix of a layer, whole."""
    return view.shape.outputs, view.shape.inputs
