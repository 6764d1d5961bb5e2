"""Forward passes → per-layer statistics.

A hook on each observed module folds a call's input into block sums and adds a probe to its output
(see `views`). A call counts once its probe has a gradient, which ties the input side to the
backward pass that used it: a forward pass that is discarded, recomputed by checkpointing, run for
input gradients only, or run without gradients leaves nothing. Hooks are idle except in steps that
update the factors.

Hooks hold no strong reference to the optimizer, and their copies and pickles are inert.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from mkor.capture.attention import AttentionInputView, LastProduct, output_order
from mkor.capture.views import View, attach
from mkor.methods.base import Seen


@dataclass
class Call:
    """One call of a module that may take part in the next update."""

    view: View
    sums: Tensor  # [G, r, i]
    counts: list[int]
    probe: Tensor  # [r, …]
    shape: tuple[int, ...]  # of the input

    @property
    def used(self) -> bool:
        """Whether a backward pass reached the layer's parameters through this call."""
        return self.probe.grad is not None


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
        return None if torch._C._functorch.maybe_current_level() is not None else capture

    def before(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Start to listen for the last matrix product inside an attention module."""
        if self.listening() is not None and not torch.compiler.is_compiling():
            self.spy = LastProduct()
            self.spy.start()

    def __call__(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        """Observe a call; returns the output with the probe added."""
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
            return capture.observe(self.views, inputs, output, operand)


class Capture:
    """Hooks on the modules of a set of views, and what they saw since the last step."""

    def __init__(self, blocks: int) -> None:
        """Keep `blocks` row blocks (the method's r) of each statistic."""
        self.blocks = blocks
        self.armed = False
        self.calls: dict[str, list[Call]] = {}
        self.handles: list[RemovableHandle] = []

    def watch(self, views: Iterable[View]) -> None:
        """Install hooks for the views, in place of those installed before."""
        self.remove()
        by_module: dict[nn.Module, list[View]] = {}
        for view in views:
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

    def observe(
        self, views: list[View], inputs: tuple[Tensor, ...], output: Any, operand: Tensor | None
    ) -> Any:
        """Record a call for each trainable view; returns the output with a probe added."""
        tensor: Tensor = output[0] if isinstance(output, tuple) else output
        active = [view for view in views if view.weight.requires_grad]
        if not active or not tensor.requires_grad:
            return None
        if operand is not None:
            operand = output_order(operand.detach(), tensor, active[-1].hooked)
        probe = active[-1].probe(tensor, self.blocks)
        for view in active:
            self.discard_cleared(view)
            seen = call_sums(view, inputs, operand, self.blocks)
            if seen is not None:
                call = Call(view, *seen, probe, tuple(inputs[0].shape))
                self.calls.setdefault(view.name, []).append(call)
        with torch.enable_grad():
            probed = attach(tensor, probe, batched=active[-1].batched(inputs[0]))
        return (probed, *output[1:]) if isinstance(output, tuple) else probed

    def collect(self, view: View, bias_shows_gradient: bool) -> Seen | None:
        """What the layer showed in the calls that were back-propagated, or None."""
        used = [call for call in self.calls.get(view.name, ()) if call.used]
        if not used:
            return None
        counts = [sum(counts) for counts in zip(*(call.counts for call in used), strict=True)]
        sums = sum_tensors([call.sums for call in used])  # [G, r, i]
        # Filled on the device: a copy from the host would wait for it.
        rows = torch.stack([sums.new_full((), count) for count in counts])  # [r]
        if view.column and view.bias_name:
            ones = rows[None, :, None].expand(sums.shape[0], -1, 1)
            sums = torch.cat([sums, ones], dim=-1)
        bias = view.bias_gradient()
        if bias is not None and bias_shows_gradient:
            grads = bias.detach().to(sums.dtype)
            return Seen(sums, grads, rows, view.gradient_norm(), grads_reduced=True)
        if isinstance(view, AttentionInputView):
            return None
        grads = sum_tensors(
            [
                call.view.gradient_sums(call.probe.grad.detach(), call.shape)  # type: ignore[union-attr]
                for call in used
            ]
        )
        return Seen(sums, grads, rows, view.gradient_norm(), grads_reduced=False)

    def discard_cleared(self, view: View) -> None:
        """Forget calls whose gradient was cleared without `zero_grad` of the optimizer.

        Not in a recomputation, where the gradient of other calls may still be on its way.
        """
        if torch.compiler.is_compiling() or torch._C._current_graph_task_id() != -1:
            return
        if view.weight.grad is None and view.name in self.calls:
            self.calls[view.name] = [call for call in self.calls[view.name] if not call.used]

    def discard_used(self) -> None:
        """Forget the calls that were back-propagated: their gradients are being cleared."""
        used = {id(call.probe) for calls in self.calls.values() for call in calls if call.used}
        for name, calls in self.calls.items():
            self.calls[name] = [call for call in calls if id(call.probe) not in used]
            for call in calls:
                if id(call.probe) in used:
                    call.probe.grad = None

    def clear(self) -> None:
        """Forget every call."""
        for calls in self.calls.values():
            for call in calls:
                call.probe.grad = None
        self.calls.clear()


def call_sums(
    view: View, inputs: tuple[Tensor, ...], operand: Tensor | None, blocks: int
) -> tuple[Tensor, list[int]] | None:
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


def sum_tensors(tensors: list[Tensor]) -> Tensor:
    """Sum of one or more tensors of one shape."""
    out = tensors[0]
    for tensor in tensors[1:]:
        out = out + tensor
    return out


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
