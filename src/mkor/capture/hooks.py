"""Forward and backward passes → per-layer statistics.

A hook on each observed module folds a call's input rows (see `folds`) and passes the output through
an identity whose backward leaves the statistics in the gradients of two small leaves a layer: the
input fold as it is, and that of the output gradient. Autograd itself then decides what counts: a
forward pass that is discarded, recomputed by checkpointing, run for input gradients only, or run
without gradients leaves nothing; calls and micro-batches add up; and compiled graphs hold the
identity as any other operation. Hooks are idle except in steps that update the factors.

Hooks hold no strong reference to the optimizer, and their copies and pickles are inert.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from mkor.capture.attention import AttentionInputView, LastProduct, output_order
from mkor.capture.calls import arguments, transformed
from mkor.capture.collect import collected, nothing
from mkor.capture.discover import Layer
from mkor.capture.folds import fold_call, sources
from mkor.capture.mask import RowMask
from mkor.capture.observe import Leaves, Observe, ObserveRows, RowLeaf, begin, fresh
from mkor.capture.views import View
from mkor.methods.base import Kind, Rows, Seen, Sums, wide


class ModuleHook:
    """Forward hook of one module; inert once its capture is gone, and when copied or pickled."""

    def __init__(self, capture: Capture | None = None, views: Iterable[View] = ()) -> None:
        """Bind to a capture; the views' module must not be reachable from a pickled hook."""
        self.capture = weakref.ref(capture) if capture is not None else None
        self.views = list(views)
        self.spy: LastProduct | None = None

    def __reduce__(self) -> tuple[type[ModuleHook], tuple[()]]:
        """Copies and pickles carry no optimizer."""
        return ModuleHook, ()

    def listening(self) -> Capture | None:
        """The capture, if this call is to be observed."""
        capture = self.capture() if self.capture is not None else None
        if capture is None or not capture.armed or not torch.is_grad_enabled():
            return None
        return None if transformed() else capture

    def before(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Start to listen for the last matrix product inside an attention module."""
        if self.listening() is not None and not torch.compiler.is_compiling():
            self.spy = LastProduct()
            self.spy.start()

    def __call__(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        """Observe a call; returns the output to go on with."""
        spy, self.spy = self.spy, None
        operand = None if spy is None else spy.stop()
        capture = self.listening()
        if capture is None or output is None:
            return None
        if getattr(module, "_is_replica", False):
            raise RuntimeError(
                "the model is replicated by DataParallel, whose replicas can't be observed; use "
                "torch.nn.parallel.DistributedDataParallel instead, or close() the optimizer"
            )
        inputs = arguments(args, kwargs)
        with torch.no_grad(), torch.autocast(inputs[0].device.type, enabled=False):
            return capture.observe(module, self.views, inputs, output, operand)


class WeightHook:
    """Notes sums of a weight's gradient as it arrives, before it is unscaled or clipped."""

    def __init__(self, capture: Capture, view: View) -> None:
        """Bind to a capture."""
        self.capture = weakref.ref(capture)
        self.view = view

    def __call__(self, weight: Tensor) -> None:
        """Called when a backward pass has added to the gradient."""
        capture = self.capture()
        dense = weight.grad is not None and weight.grad.layout == torch.strided
        if capture is not None and capture.armed and dense:
            assert weight.grad is not None
            capture.shown[self.view.name] = self.view.checksums(weight.grad.detach())


class Capture:
    """Hooks on the modules of a set of layers, and what they saw since the last step."""

    def __init__(self, absolute: bool = False) -> None:
        """Idle until `armed`.

        Args:
            absolute: Whether to note what the weight gradients were before they are unscaled.
        """
        self.kinds: dict[str, tuple[Kind, Kind]] = {}
        self.absolute = absolute
        self.armed = False
        self.seed = 0
        self.layers: dict[str, Layer] = {}
        self.leaves: dict[str, Leaves | RowLeaf] = {}
        self.shown: dict[str, Tensor] = {}
        self.noted: dict[str, Tensor] = {}
        self.handles: list[RemovableHandle] = []
        self.mask = RowMask()

    def arm(self, kinds: dict[str, tuple[Kind, Kind]], seed: int) -> None:
        """Forget what was seen, and listen from the next forward pass on.

        Args:
            kinds: What to keep of each layer's inputs and output gradients.
            seed: For methods that draw rows or signs.
        """
        self.armed, self.seed = True, seed
        self.mask.spent = False
        if kinds != self.kinds:
            self.kinds = kinds
            self.leaves = {n: self.make_leaves(layer.view) for n, layer in self.layers.items()}
        begin(self.leaves, kinds, seed)
        self.clear()

    def watch(self, layers: dict[str, Layer], kinds: dict[str, tuple[Kind, Kind]]) -> None:
        """Install hooks for the layers, in place of those installed before."""
        self.remove()
        self.layers, self.kinds = layers, kinds
        self.leaves = {name: self.make_leaves(layer.view) for name, layer in layers.items()}
        by_module: dict[nn.Module, list[View]] = {}
        for layer in layers.values():
            self.note(layer.view)
            for view in layer.calls:
                by_module.setdefault(view.hooked, []).append(view)
        for module, own in by_module.items():
            self.install(module, ModuleHook(self, own))

    def install(self, module: nn.Module, hook: ModuleHook) -> None:
        """Put the hook on a module."""
        attention = isinstance(module, nn.MultiheadAttention)
        if attention:
            self.handles.append(module.register_forward_pre_hook(hook.before, with_kwargs=True))
        after = module.register_forward_hook(hook, with_kwargs=True, always_call=attention)
        self.handles.append(after)

    def note(self, view: View) -> None:
        """Watch the gradient of a weight that trains, unless it is watched or need not be."""
        weight = view.weight
        if self.absolute and weight.requires_grad and self.noted.get(view.name) is not weight:
            self.noted[view.name] = weight
            hook = WeightHook(self, view)
            self.handles.append(weight.register_post_accumulate_grad_hook(hook))

    def remove(self) -> None:
        """Remove every hook and forget what was seen."""
        self.noted.clear()
        for handle in self.handles:
            handle.remove()
        self.handles.clear()
        self.clear()

    def make_leaves(self, view: View) -> Leaves | RowLeaf:
        """Leaves beside the layer's weight."""
        kinds = self.kinds[view.name]
        return (
            RowLeaf(view) if isinstance(kinds[0], Rows) else Leaves.beside(view, kinds, self.seed)
        )

    def leaves_of(self, view: View) -> Leaves | RowLeaf:
        """The layer's leaves, made anew where the weight has moved or changed its dtype.

        Statistics of gradients that were cleared without `zero_grad` of the optimizer are
        forgotten, but not in a recomputation, where those gradients may still be on their way.
        """
        leaves, weight = self.leaves[view.name], view.weight
        mark = leaves.mark
        if mark.device != weight.device or mark.dtype != wide(weight.dtype):
            leaves = self.leaves[view.name] = self.make_leaves(view)
        if torch.compiler.is_compiling():
            return leaves
        self.note(view)
        if weight.grad is None and torch._C._current_graph_task_id() == -1:
            leaves.clear()
        return leaves

    def observe(
        self,
        module: nn.Module,
        views: list[View],
        inputs: tuple[Tensor, ...],
        output: Any,
        operand: Tensor | None,
    ) -> Any:
        """Observe a call for each trainable view; returns the output to go on with."""
        tensor: Tensor = output[0] if isinstance(output, tuple) else output
        active = [view for view in views if view.weight.requires_grad]
        if not active or not tensor.requires_grad:
            return None
        if operand is not None:
            operand = output_order(operand.detach(), tensor, active[-1].hooked)
        own = active[0].part.own(inputs)
        seen = {view: tensors for view in active if (tensors := sources(view, own, operand))}
        masks = {view: self.mask.of(view, tensors) for view, tensors in seen.items()}
        if isinstance(self.leaves[active[0].name], RowLeaf):
            observed = self.observe_rows(module, seen, masks, tensor) if seen else tensor
        else:
            observed = self.observe_folds(module, active, seen, masks, inputs, tensor)
        return (observed, *output[1:]) if isinstance(output, tuple) else observed

    def observe_folds(
        self,
        module: nn.Module,
        active: list[View],
        seen: dict[View, list[Tensor]],
        masks: dict[View, list[Tensor] | None],
        inputs: tuple[Tensor, ...],
        output: Tensor,
    ) -> Tensor:
        """Pass the output through the identity that fills the leaves of sums or moments."""
        shape = inputs[0].shape
        leaves: list[Tensor] = []
        folds: list[Tensor] = []
        for view in active:
            leaf = self.leaves_of(view)
            assert isinstance(leaf, Leaves)
            kind, start = self.kinds[view.name][0], leaf.seed
            if view in seen:
                leaf.note(inputs)
                leaves.append(leaf.inputs)
                start, fold = fold_call(kind, view, seen[view], leaf.seed, masks[view])
                folds.append(fold.to(leaf.inputs.dtype))
        last, outputs = active[-1], self.output_leaf(active[-1])
        kind, rows = self.kinds[last.name][1], masks.get(last)
        mask = None if rows is None else rows[0]
        with torch.enable_grad():
            observed: Tensor = Observe.apply(  # type: ignore[no-untyped-call]
                output, fresh(module), last, shape, kind, outputs, start, mask, *leaves, *folds
            )
        return observed

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # rows are kept in lists, which a compiled graph can't hold
    def observe_rows(
        self,
        module: nn.Module,
        seen: dict[View, list[Tensor]],
        masks: dict[View, list[Tensor] | None],
        output: Tensor,
    ) -> Tensor:
        """Pass the output through the identity that keeps the rows of the call."""
        (view, (inputs,)) = next(reversed(seen.items()))
        leaf, kind = self.leaves_of(view), self.kinds[view.name][0]
        assert isinstance(leaf, RowLeaf) and isinstance(kind, Rows)
        keep, rows = leaf.keeper(kind.compress, self.seed), masks[view]
        mask = None if rows is None else rows[0]
        with torch.enable_grad():
            observed: Tensor = ObserveRows.apply(  # type: ignore[no-untyped-call]
                output, fresh(module), view, keep, leaf.mark, inputs.to(output.dtype), mask
            )
        return observed

    def output_leaf(self, view: View) -> Tensor | None:
        """Where the output gradient is to be folded; None where a bias shows it, or nothing."""
        leaves = self.leaves[view.name]
        assert isinstance(leaves, Leaves)
        sums = isinstance(self.kinds[view.name][1], Sums)
        by_bias = sums and self.layers[view.name].bias_shows_gradient
        return None if by_bias or isinstance(view, AttentionInputView) else leaves.outputs

    def collect(self, layer: Layer) -> Seen | None:
        """What the layer showed in the calls that were back-propagated, or None."""
        name = layer.view.name
        return collected(layer, self.leaves[name], self.kinds[name], self.shown.get(name))

    def nothing(self, layer: Layer) -> Seen:
        """The statistic of a layer that this worker didn't use: no rows."""
        return nothing(layer, self.kinds[layer.view.name], self.absolute)

    def clear(self) -> None:
        """Forget every statistic."""
        self.shown.clear()
        self.mask.forgive()
        for leaves in self.leaves.values():
            leaves.clear()


def remove_inert_hooks(model: nn.Module) -> None:
    """Remove hooks that a copied or unpickled model carries from its original."""
    for module in model.modules():
        for hooks in (module._forward_hooks, module._forward_pre_hooks):
            for key, hook in list(hooks.items()):
                owner = getattr(hook, "__self__", hook)
                if isinstance(owner, ModuleHook) and owner.capture is None:
                    del hooks[key]
                    module._forward_hooks_with_kwargs.pop(key, None)
                    module._forward_pre_hooks_with_kwargs.pop(key, None)
                    module._forward_hooks_always_called.pop(key, None)
