"""Forward and backward passes → per-layer statistics.

A hook on each observed module sums a call's input rows (see `views`) and passes the output through
an identity whose backward leaves the statistics in the gradients of two small leaves a layer: the
input sums as they are, the output gradient summed in the same blocks. Autograd itself then decides
what counts: a forward pass that is discarded, recomputed by checkpointing, run for input gradients
only, or run without gradients leaves nothing; calls and micro-batches add up; and compiled graphs
hold the identity as any other operation. Hooks are idle except in steps that update the factors.

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
from mkor.capture.discover import Layer
from mkor.capture.observe import Leaves, Observe, fresh, with_counts
from mkor.capture.views import Sums, View
from mkor.methods.base import Seen, wide


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


class Capture:
    """Hooks on the modules of a set of layers, and what they saw since the last step."""

    def __init__(self, blocks: int) -> None:
        """Keep `blocks` row blocks (the method's r) of each statistic."""
        self.blocks = blocks
        self.armed = False
        self.layers: dict[str, Layer] = {}
        self.leaves: dict[str, Leaves] = {}
        self.handles: list[RemovableHandle] = []

    def watch(self, layers: dict[str, Layer]) -> None:
        """Install hooks for the layers, in place of those installed before."""
        self.remove()
        self.layers = layers
        self.leaves = {name: self.make_leaves(layer.view) for name, layer in layers.items()}
        by_module: dict[nn.Module, list[View]] = {}
        for layer in layers.values():
            for view in layer.calls:
                by_module.setdefault(view.hooked, []).append(view)
        for module, own in by_module.items():
            hook = ModuleHook(self, own)
            attention = isinstance(module, nn.MultiheadAttention)
            if attention:
                pre = module.register_forward_pre_hook(hook.before, with_kwargs=True)
                self.handles.append(pre)
            after = module.register_forward_hook(hook, with_kwargs=True, always_call=attention)
            self.handles.append(after)

    def remove(self) -> None:
        """Remove every hook and forget what was seen."""
        for handle in self.handles:
            handle.remove()
        self.handles.clear()
        self.clear()

    def make_leaves(self, view: View) -> Leaves:
        """Leaves beside the layer's weight."""
        shape, weight = view.shape, view.weight
        inputs = shape.inputs + (not view.has_bias_column)
        made = [
            torch.zeros(shape.stack, self.blocks, side, dtype=wide(weight.dtype))
            .to(weight.device)
            .requires_grad_()
            for side in (inputs, shape.outputs)
        ]
        return Leaves(*made)

    def leaves_of(self, view: View) -> Leaves:
        """The layer's leaves, made anew where the weight has moved or changed its dtype.

        Statistics of gradients that were cleared without `zero_grad` of the optimizer are
        forgotten, but not in a recomputation, where those gradients may still be on their way.
        """
        leaves, weight = self.leaves[view.name], view.weight
        inputs = leaves.inputs
        if inputs.device != weight.device or inputs.dtype != wide(weight.dtype):
            leaves = self.leaves[view.name] = self.make_leaves(view)
        cleared = not torch.compiler.is_compiling() and weight.grad is None
        if cleared and torch._C._current_graph_task_id() == -1:
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
        leaves: list[Tensor] = []
        sums: list[Tensor] = []
        for view in active:
            leaf = self.leaves_of(view).inputs
            seen = call_sums(view, inputs, operand, self.blocks)
            if seen is not None:
                leaves.append(leaf)
                sums.append(with_counts(*seen).to(leaf.dtype))
        outputs = self.output_leaf(active[-1])
        with torch.enable_grad():
            seen_output: Tensor = Observe.apply(  # type: ignore[no-untyped-call]
                tensor, fresh(module), active[-1], inputs[0].shape, outputs, *leaves, *sums
            )
        return (seen_output, *output[1:]) if isinstance(output, tuple) else seen_output

    def output_leaf(self, view: View) -> Tensor | None:
        """Where the output gradient is to be summed; None where a bias shows it, or nothing."""
        if self.layers[view.name].bias_shows_gradient or isinstance(view, AttentionInputView):
            return None
        return self.leaves[view.name].outputs

    def collect(self, layer: Layer) -> Seen | None:
        """What the layer showed in the calls that were back-propagated, or None."""
        view, leaves = layer.view, self.leaves[layer.view.name]
        if leaves.inputs.grad is None:
            return None
        inputs = leaves.inputs.grad.detach()  # [G, r, i + 1]
        rows = inputs[0, :, -1]  # [r]
        inputs = inputs if view.has_bias_column else inputs[..., :-1]
        bias = view.bias_gradient()
        if bias is not None and layer.bias_shows_gradient:
            grads = bias.detach().to(inputs.dtype)
            return Seen(inputs, grads, rows, view.gradient_norm(), grads_reduced=True)
        if leaves.outputs.grad is None:
            return None
        grads = leaves.outputs.grad.detach()  # [G, r, o]
        return Seen(inputs, grads, rows, view.gradient_norm(), grads_reduced=False)

    def clear(self) -> None:
        """Forget every statistic."""
        for leaves in self.leaves.values():
            leaves.clear()


def transformed() -> bool:
    """Whether the call belongs to a functional transform, a trace or an export, not to training."""
    if torch._C._functorch.maybe_current_level() is not None:
        return True
    exporting = getattr(torch.compiler, "is_exporting", lambda: False)()
    return bool(exporting) or torch._C._get_tracing_state() is not None


def call_sums(
    view: View, inputs: tuple[Tensor, ...], operand: Tensor | None, blocks: int
) -> Sums | None:
    """Block sums of the rows that a call showed to a view; None where they can't be seen."""
    if isinstance(view, AttentionInputView):
        return view.call_sums(tuple(tensor.detach() for tensor in inputs), blocks)
    if isinstance(view.hooked, nn.MultiheadAttention):
        return None if operand is None else view.input_sums(operand, blocks)
    return view.input_sums(inputs[0].detach(), blocks)


def arguments(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor, ...]:
    """The input tensors of a call: query, key and value of an attention, else the first one."""
    if "query" in kwargs or "key" in kwargs or "value" in kwargs:
        args = (*args, *(kwargs[name] for name in ("query", "key", "value") if name in kwargs))
        return args[:3]
    return tuple(value for value in (*args, *kwargs.values()) if isinstance(value, Tensor))


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
