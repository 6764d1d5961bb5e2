"""One optimizer in one call: MKOR on the momentum of weight matrices, AdamW for the rest."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from mkor import validate
from mkor.baselines.split import SplitAdamW
from mkor.capture.attention import AttentionInputView
from mkor.capture.discover import FOREIGN, find_layers
from mkor.capture.views import View
from mkor.checks import Schedule, one_of, refuse_sparse
from mkor.optimizers.mkor import MKOR
from mkor.report import LayerInfo
from mkor.rescale import SIZED


class Auto(MKOR):
    """The optimizer that `mkor.auto` builds: a `mkor.MKOR` on a base that is two optimizers.

    A parameter group's `update` tells them apart: "direct" groups hold what MKOR updates, "adamw"
    groups the rest.
    """

    base: SplitAdamW

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take a step; see `mkor.Preconditioner.step`.

        Raises:
            RuntimeError: The optimizer was closed; the `update` of a group was edited; a gradient
                is sparse; or, of an attention's input projection, the bias trains and the weight
                was frozen since.
        """
        if self._closed:
            raise RuntimeError(
                "this optimizer was closed, and without its hooks it has no updates for the "
                "weight matrices; build a new one with mkor.auto(model, lr=...)"
            )
        self._refuse_edits()
        self._refuse_lone_biases()
        return super().step(closure)

    def _rewrite(self, update: bool = True) -> None:
        every = (p for group in self.param_groups for p in group["params"])
        refuse_sparse(every, "mkor.auto", "AdamW averages the squares of all entries")
        super()._rewrite(update)

    def _attach(self, *parts: Any) -> None:
        super()._attach(*parts)
        self._updates = self._kinds()

    def _kinds(self) -> list[Any]:
        """The `update` of each group."""
        return [group.get("update") for group in self.param_groups]

    def _refuse_edits(self) -> None:
        """Refuse groups that MKOR updates and whose results AdamW would take, or the reverse."""
        for number, (now, then) in enumerate(zip(self._kinds(), self._updates, strict=False)):
            if now != then:
                raise RuntimeError(
                    f"the update of group {number} was changed from {then!r} to {now!r}, but which "
                    "layers are observed was settled before: set it back, and name layers for "
                    "AdamW by mkor.auto(model, adamw=[...])"
                )

    def _refuse_lone_biases(self) -> None:
        """Refuse a bias that would step along its bare gradient, as its matrix has none."""
        for view in projections(layer.view for layer in self._engine.layers.values()):
            bias = view.bias
            if bias is not None and bias.requires_grad and not view.weight.requires_grad:
                raise RuntimeError(
                    f"the weight of '{view.name}' is frozen while its bias trains, but both are "
                    "one matrix here; freeze the bias as well, or build the optimizer after the "
                    "weight is frozen, which leaves the bias to AdamW"
                )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group: by default AdamW's, with its learning rate.

        Raises:
            ValueError: The group has parameters that are not the model's; or its `update` is
                unknown, or "direct" for parameters that are no matrix MKOR can update.
        """
        param_group = validate.listed(param_group)
        if param_group.get("update") == "direct":
            self._refuse_unobserved(validate.tensors(param_group["params"]))
        super().add_param_group(param_group)
        self._updates.append(self.param_groups[-1]["update"])

    def _refuse_unobserved(self, params: list[Tensor]) -> None:
        """Refuse parameters that would step along their bare gradient."""
        optimized = self._optimized() | {id(p) for p in params}
        layers, _ = find_layers(self.model, optimized, (), lambda view: None)
        views = [layer.view for layer in layers.values()]
        covered = {id(view.weight) for view in views}
        covered |= {id(view.bias) for view in views if view.has_bias_column}
        names = {id(p): name for name, p in self.model.named_parameters()}
        bare = [names[id(p)] for p in params if id(p) in names and id(p) not in covered]
        if bare:
            raise ValueError(
                f"the group has update='direct', but {bare[0]!r} is not the weight of a layer that "
                "MKOR can update, nor a bias beside one: leave it to AdamW, in a group with "
                "update='adamw'"
            )

    def layers(self) -> list[LayerInfo]:
        """One record per layer: what is preconditioned, and what AdamW trains and why."""
        every = {id(p) for p in self.model.parameters()}
        _, left = find_layers(self.model, every, (), lambda view: None)
        why = {module.name: module.reason for module in left}
        return [
            replace(info, reason=why.get(info.name, "chosen for AdamW"))
            if info.reason == FOREIGN
            else info
            for info in super().layers()
        ]

    def _optimized(self) -> set[int]:
        """The `id` of every parameter that MKOR updates."""
        groups = [group for group in self.param_groups if group["update"] == "direct"]
        return {id(p) for group in groups for p in group["params"]}


def auto(
    model: nn.Module,
    lr: float = 3e-3,
    *,
    adamw_lr: float | None = None,
    adamw: Sequence[str] = (),
    betas: tuple[float, float] = (0.9, 0.95),
    eps: float = 1e-8,
    weight_decay: float = 0.01,
    momentum: Schedule = 0.9,
    vectors: int = 16,
    rank: int = 40,
    power: float = 0.75,
    rescale: str = "rms",
    factor_decay: Schedule = 0.95,
    damping: Schedule = 0.003,
    factor_update_steps: int | Callable[[int], int] = 4,
    warmup_steps: int = 10,
    kl_clip: Schedule | None = None,
    state_dtype: torch.dtype | None = None,
    wire_dtype: torch.dtype | None = None,
    on_nonfinite: str = "skip",
) -> Auto:
    """Build one optimizer for a whole model, with one learning rate to choose.

    The weight matrices of layers whose inputs and output gradients can be observed (linear layers,
    convolutions, attention's projections) are updated along their Nesterov momentum,
    preconditioned by low-rank sketches of both covariances and scaled to a root mean square of 1:
    `lr` is the size of a step in every entry, about that of AdamW. AdamW trains everything else:
    biases, norms, embeddings, weights that are tied to them, and what `adamw` names. Weights
    decay decoupled from their updates; parameters with one dimension don't.

    `optimizer.layers()` tells what became of each layer. Groups have the key `update`, "direct" or
    "adamw", and schedulers scale the learning rates of all of them.

    Example:
        >>> optimizer = mkor.auto(model, lr=3e-3)
        >>> loss.backward(); optimizer.step(); optimizer.zero_grad()

    Args:
        model: The model; layers are observed by hooks.
        lr: Learning rate of the matrices: a number or a tensor of one.
        adamw_lr: That of AdamW; None for 4 times `lr`.
        adamw: Regular expressions; layers in whose name one of them is found are left to AdamW.
        betas: AdamW's decays of the averages of the gradient and of its square.
        eps: Added to the root of the second average.
        weight_decay: Weight decay (λ) of parameters with two dimensions or more.
        momentum: Decay β of the momentum.
        vectors: Random sums of a layer's rows an update (r).
        rank: Eigenvectors that are kept of a side's covariance (k).
        power: Exponent p of the inverse covariances.
        rescale: Root mean square of an update: "rms" for 1, "fan_in" for √(128/i) of a matrix with
            i inputs, with which one `lr` fits networks of more widths.
        factor_decay: Weight of the old covariance in its moving average (γ).
        damping: Weight of the identity relative to the trace of the covariance (μ).
        factor_update_steps: Steps between updates of the covariances (f).
        warmup_steps: Steps at the start that all update them.
        kl_clip: As of `mkor.MKOR`.
        state_dtype: Dtype of the eigenvectors; None for float32, or float64 for such parameters.
        wire_dtype: Dtype of the sketches while they cross workers.
        on_nonfinite: As of `mkor.MKOR`.

    Raises:
        TypeError: `model` is of the wrong type.
        ValueError: An option is out of range, or the model has nothing to train, lazy parameters
            or an embedding with sparse gradients.
    """
    validate.check_model(model)
    check_modules(model)
    validate.patterns("adamw", adamw)
    one_of("rescale", rescale, tuple(SIZED))
    groups = split(model, adamw)
    base = SplitAdamW(
        groups, lr, adamw_lr=adamw_lr, betas=betas, eps=eps, weight_decay=weight_decay
    )
    return Auto(
        model,
        base,
        representation="lowrank",
        statistic="sketch",
        rescale=rescale,
        momentum=momentum,
        vectors=vectors,
        rank=rank,
        power=power,
        factor_decay=factor_decay,
        damping=damping,
        factor_update_steps=factor_update_steps,
        warmup_steps=warmup_steps,
        kl_clip=kl_clip,
        state_dtype=state_dtype,
        wire_dtype=wire_dtype,
        on_nonfinite=on_nonfinite,
    )


def check_modules(model: nn.Module) -> None:
    """Refuse lazy parameters, whose shape would decide their update, and sparse gradients."""
    for name, module in model.named_modules():
        tables = isinstance(module, (nn.Embedding, nn.EmbeddingBag))
        if tables and module.sparse and module.weight.requires_grad:
            raise ValueError(
                f"{type(module).__name__} '{name}' has sparse=True, but AdamW, which trains "
                "embeddings here, takes dense gradients only: build it with sparse=False"
            )
    for name, parameter in model.named_parameters():
        if is_lazy(parameter):
            raise ValueError(
                f"parameter '{name}' is not initialised yet: run a forward pass before building "
                "the optimizer"
            )


def split(model: nn.Module, adamw: Sequence[str]) -> list[dict[str, Any]]:
    """Parameter groups: what MKOR updates, and what AdamW trains with and without decay.

    Args:
        model: The model.
        adamw: Patterns of layers for AdamW.

    Raises:
        ValueError: No parameter is to be trained.
    """
    if not any(p.requires_grad for p in model.parameters()):
        raise ValueError("no parameter of the model has requires_grad=True: nothing to optimize")
    matrices = updated(model, adamw)
    chosen = {id(p) for p in matrices}
    rest = [p for p in model.parameters() if id(p) not in chosen]
    groups: list[dict[str, Any]] = [
        {"params": matrices, "update": "direct"},
        {"params": [p for p in rest if p.dim() > 1], "update": "adamw"},
        {"params": [p for p in rest if p.dim() <= 1], "update": "adamw", "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def updated(model: nn.Module, adamw: Sequence[str]) -> list[Tensor]:
    """The parameters that MKOR updates: weights of layers that can be observed, frozen or not.

    The input projection of `nn.MultiheadAttention` shows its output gradient by its bias alone,
    which so belongs to the matrix; AdamW has both unless they train, or are frozen, together.
    """
    every = {id(p) for p in model.parameters()}
    layers, _ = find_layers(model, every, adamw, lambda view: None)
    views = [layer.view for layer in layers.values()]
    whole = whole_biases(projections(views))
    found: dict[int, Tensor] = {}
    for view in views:
        bias = view.bias if isinstance(view, AttentionInputView) else None
        if bias is None:
            found[id(view.weight)] = view.weight
        elif id(bias) in whole:
            found |= {id(view.weight): view.weight, id(bias): bias}
    return list(found.values())


def projections(views: Iterable[View]) -> list[AttentionInputView]:
    """The views of attention's input projections."""
    return [view for view in views if isinstance(view, AttentionInputView)]


def whole_biases(views: Iterable[View]) -> set[int]:
    """The `id` of biases each entry of which belongs to a view whose weight trains if it does."""
    rows: Counter[Tensor] = Counter()  # tensors are hashed by identity
    for view in views:
        if view.bias is not None and view.weight.requires_grad == view.bias.requires_grad:
            rows[view.bias] += view.shape.stack * view.shape.outputs
    return {id(bias) for bias, count in rows.items() if count == bias.numel()}
