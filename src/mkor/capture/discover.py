"""Which layers of a model are preconditioned, and why the others are not."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

from torch import nn
from torch.nn.parameter import UninitializedParameter, is_lazy

from mkor.capture.attention import AttentionInputView, attention_views, computed_parts
from mkor.capture.convs import ConvView, TransposedConvView
from mkor.capture.views import HFConv1DView, LinearView, View
from mkor.methods.base import LayerShape
from mkor.warn import warn

WRAPPERS = {"module", "_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"}
"""Names that DDP, torch.compile, checkpoint wrappers and FSDP put into module paths."""

FOREIGN = "its weight is not in the base optimizer"
COMPUTED = "its weight is computed, not a parameter"


@dataclass
class Layer:
    """One weight that may be preconditioned, with every module call that multiplies by it.

    Attributes:
        view: The view that reads and writes the gradient.
        calls: Views of all modules that share the weight, `view` among them.
    """

    view: View
    calls: list[View]

    @property
    def bias_shows_gradient(self) -> bool:
        """Whether `bias.grad` is the sum of row gradients; not for a weight with several users."""
        bias = self.view.bias
        trains = bias is not None and bias.requires_grad
        return trains and self.view.bias_shows_gradient and len(self.calls) == 1


@dataclass(frozen=True)
class LeftOut:
    """A module whose parameters stay with the base optimizer, and the reason."""

    name: str
    kind: str
    shape: tuple[int, ...]
    reason: str


def clean_name(name: str) -> str:
    """A module path without the components that wrappers add."""
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)


def find_layers(
    model: nn.Module,
    optimized: set[int],
    skip: Iterable[str],
    accept: Callable[[View], str | None],
) -> tuple[dict[str, Layer], list[LeftOut]]:
    """Find the layers to precondition.

    Args:
        model: The model.
        optimized: `id` of every parameter in the base optimizer.
        skip: Regular expressions; a module whose name one of them matches anywhere is left out.
        accept: Says why the method can't take a view, or None if it can.

    Returns:
        Layers by name, and what is left out with its reason.
    """
    found, left = all_views(model)
    users = owners(model)
    patterns = list(skip)
    layers: dict[str, Layer] = {}
    for views in found.values():
        for view in views:
            leave_foreign_bias(view, optimized)
        view = views[0]
        reason = (
            "skipped by a skip pattern"
            if any(matches(patterns, v.name) for v in views)
            else unusable(view, optimized) or shared(views, users) or accept(view)
        )
        if reason is None:
            for other in views:
                other.name = view.name
            layers[view.name] = Layer(view, views)
        else:
            shape = tuple(view.weight.shape)
            left.append(LeftOut(view.name, view.kind, shape, reason))
    names = [clean_name(name) for name, _ in model.named_modules()]
    warn_unmatched(patterns, names + [view.name for views in found.values() for view in views])
    return layers, left


def all_views(model: nn.Module) -> tuple[dict[int, list[View]], list[LeftOut]]:
    """Every view of the model, grouped by weight, and modules that have no rule."""
    found: dict[int, list[View]] = {}
    left: list[LeftOut] = []
    inside_attention = {
        id(module.out_proj)
        for module in model.modules()
        if isinstance(module, nn.MultiheadAttention)
    }
    for path, module in model.named_modules():
        name = clean_name(path)
        direct = dict(module.named_parameters(recurse=False))
        if id(module) in inside_attention:
            continue
        reason = no_rule(module, direct)
        if reason is None:
            for view in views_of(name, module):
                found.setdefault(id(view.weight), []).append(view)
        elif direct or reason == COMPUTED:
            sizes = [tuple(p.shape) for p in direct.values() if not is_lazy(p)]
            shape = max(sizes, key=math.prod, default=())
            left.append(LeftOut(name or "(model)", type(module).__name__, shape, reason))
        if isinstance(module, nn.MultiheadAttention):
            parts = [f"{name or 'MultiheadAttention'}.{part}" for part in computed_parts(module)]
            left += [LeftOut(part, type(module).__name__, (), COMPUTED) for part in parts]
    return found, left


def no_rule(module: nn.Module, direct: dict[str, nn.Parameter]) -> str | None:
    """Why a module has no matrix view, or None if it has one."""
    if any(isinstance(parameter, UninitializedParameter) for parameter in direct.values()):
        return "not initialised yet: run a forward pass before building the optimizer"
    if isinstance(module, nn.MultiheadAttention):
        return None
    if view_type(module) is None:
        return f"no rule for {type(module).__name__}"
    if module._parameters.get("weight") is None:
        return COMPUTED
    if module._parameters["weight"].numel() == 0:  # type: ignore[union-attr]
        return "its weight is empty"
    return None


def view_type(module: nn.Module) -> type[View] | None:
    """The view class for a module, attention aside."""
    if isinstance(module, nn.Linear):
        return LinearView
    if isinstance(module, (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)):
        return TransposedConvView
    if isinstance(module, (nn.Conv1d, nn.Conv2d, nn.Conv3d)):
        return ConvView
    names = {cls.__name__ for cls in type(module).__mro__}
    return HFConv1DView if "Conv1D" in names and hasattr(module, "nf") else None


def views_of(name: str, module: nn.Module) -> list[View]:
    """The views of one supported module."""
    if isinstance(module, nn.MultiheadAttention):
        return attention_views(name or "MultiheadAttention", module)
    cls = view_type(module)
    assert cls is not None
    bias = "bias" if module._parameters.get("bias") is not None else None
    weight: Any = module.weight
    stack, column = 1, True
    if cls is HFConv1DView:
        inputs, outputs = weight.shape
    elif cls is TransposedConvView:
        stack, column = module.groups, False  # type: ignore[assignment]
        inputs, outputs = weight.shape[0] // stack, weight[0].numel()
    else:
        stack = getattr(module, "groups", 1)
        outputs, inputs = weight.shape[0] // stack, weight[0].numel()
    shape = LayerShape(stack, outputs, inputs + (column and bias is not None))
    kind = type(module).__name__
    return [
        cls(name or kind, kind, module, module, "weight", bias, shape, (None, None), column, column)
    ]


def leave_foreign_bias(view: View, optimized: set[int]) -> None:
    """Take a bias that the base doesn't have out of the matrix: its gradient is not ours."""
    if view.bias is not None and id(view.bias) not in optimized:
        view.bias_name = None
        view.shape = replace(view.shape, inputs=view.shape.inputs - view.column)


def owners(model: nn.Module) -> dict[int, list[str]]:
    """Names and kinds of the modules that own each parameter, by `id`."""
    users: dict[int, list[str]] = {}
    for path, module in model.named_modules():
        for parameter in module._parameters.values():
            if parameter is not None:
                label = f"{type(module).__name__} '{clean_name(path)}'"
                users.setdefault(id(parameter), []).append(label)
    return users


def unusable(view: View, optimized: set[int]) -> str | None:
    """Reason for a weight that can't be preconditioned whatever the method."""
    if id(view.weight) not in optimized:
        return FOREIGN
    if not view.weight.is_floating_point():
        return f"its weight is {view.weight.dtype}"
    if isinstance(view, AttentionInputView) and not view.bias_name:
        return "its output gradient can't be observed without a bias in the base optimizer"
    return None


def shared(views: list[View], users: dict[int, list[str]]) -> str | None:
    """Reason for a shared weight that can't be preconditioned once for all its users."""
    first = views[0]
    others = users[id(first.weight)]
    if len(others) > len(views):
        own = {f"{type(view.owner).__name__} '{view.name}'" for view in views}
        return "its weight is shared with " + ", ".join(o for o in others if o not in own)
    if any(type(view) is not type(first) or view.shape != first.shape for view in views):
        return "its weight is shared by layers of different kinds: " + ", ".join(others)
    return None


def matches(patterns: list[str], name: str) -> bool:
    """Whether any pattern is found in the name."""
    return any(re.search(pattern, name) for pattern in patterns)


def warn_unmatched(patterns: list[str], names: list[str]) -> None:
    """Warn of patterns that match no module and no layer."""
    for pattern in patterns:
        if not any(re.search(pattern, name) for name in names):
            warn(f"pattern {pattern!r} matches no module name; see optimizer.layers()")
