"""An optimizer whose groups, state and defaults are those of the base optimizer, always.

It runs torch's hooks on state dicts, too, since its own are not those of torch.
"""

from __future__ import annotations

from typing import Any, TypeVar

from torch.optim import Optimizer

Self = TypeVar("Self", bound="Delegate")


class Delegate(Optimizer):
    """What schedulers and code that edits groups see is the base's own."""

    base: Optimizer

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The base optimizer's parameter groups."""
        return self.base.param_groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self.base.param_groups = groups

    @property
    def state(self) -> Any:
        """The base optimizer's state."""
        return self.base.state

    @state.setter
    def state(self, state: Any) -> None:
        self.base.state = state

    @property
    def defaults(self) -> dict[str, Any]:
        """The base optimizer's defaults."""
        return self.base.defaults

    @defaults.setter
    def defaults(self, defaults: dict[str, Any]) -> None:
        self.base.defaults = defaults

    def _rates(self) -> dict[int, Any]:
        """Learning rates by the `id` of the parameter."""
        return {id(p): group["lr"] for group in self.param_groups for p in group["params"]}

    def _optimized(self) -> set[int]:
        """The `id` of every parameter."""
        return {id(p) for group in self.param_groups for p in group["params"]}

    def _before_saving(self) -> None:
        for hook in self._optimizer_state_dict_pre_hooks.values():
            hook(self)

    def _saved(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """What the hooks of torch make of a state dict."""
        for hook in self._optimizer_state_dict_post_hooks.values():
            changed = hook(self, state_dict)
            state_dict = state_dict if changed is None else changed
        return state_dict

    def _loadable(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """What the hooks of torch make of a state dict that is to be loaded."""
        for hook in self._optimizer_load_state_dict_pre_hooks.values():
            changed = hook(self, state_dict)
            state_dict = state_dict if changed is None else changed
        return state_dict

    def _after_loading(self) -> None:
        for hook in self._optimizer_load_state_dict_post_hooks.values():
            hook(self)

    def close(self) -> None:
        """Give up what was installed."""

    def __enter__(self: Self) -> Self:
        """The optimizer itself; leaving the block closes it."""
        return self

    def __exit__(self, *exc: object) -> None:
        """Close the optimizer."""
        self.close()
