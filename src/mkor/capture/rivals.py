"""Two optimizers on one weight would precondition one gradient twice: the later one is refused.

The hooks of an optimizer are its claim to a module. They go when it is closed or collected, and
copies of them are inert, so that nothing else has to be kept. Whoever rebinds a name to a new
optimizer holds both for a moment; that is why the claim counts at the first step, not before.
"""

from __future__ import annotations

from mkor.capture.hooks import Capture, ModuleHook
from mkor.capture.views import View


def refuse_rivals(capture: Capture) -> None:
    """Raise if an optimizer that was built before observes a weight of this one's.

    Raises:
        RuntimeError: It does, and is neither closed nor gone.
    """
    contested = [
        layer.view.name for layer in capture.layers.values() if any(map(claimed, layer.calls))
    ]
    if contested:
        raise RuntimeError(
            f"an optimizer that was built before preconditions {', '.join(contested[:3])} too, and "
            "two would precondition one gradient twice; nothing was changed. close() the first "
            "one, or give each a base with parameters of its own"
        )


def claimed(view: View) -> bool:
    """Whether an earlier hook on the view's module is another optimizer's and has its weight."""
    for hook in view.hooked._forward_hooks.values():
        if not isinstance(hook, ModuleHook) or hook.capture is None or hook.capture() is None:
            continue
        if any(view is own for own in hook.views):
            return False
        if any(view.weight is other.weight for other in hook.views):
            return True
    return False
