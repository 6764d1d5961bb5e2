"""The optimizer's part of a checkpoint: plain dicts, lists, numbers and tensors.

`state_dict()` is the base optimizer's, in torch's layout, plus the key "preconditioner" with the
factors by layer name and the names of the parameters in each group. Nothing in it depends on the
order of modules, and `torch.load(weights_only=True)` reads it.
"""

from __future__ import annotations

import copy
from collections.abc import Collection
from typing import Any

from torch import nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from mkor.capture import pending
from mkor.capture.discover import clean_name
from mkor.engine import Engine
from mkor.handover import Handover
from mkor.meter import Meter
from mkor.packed import check_packed
from mkor.record import Record

KEY = "preconditioner"
"""Where the factors stand in a state dict."""


def parameter_names(model: nn.Module, groups: list[dict[str, Any]]) -> list[list[str]]:
    """Names of the parameters of each group, without the prefixes of wrappers.

    A parameter that the model has lost since, as when a module was replaced, is named by its place.
    """
    names = {id(parameter): clean_name(name) for name, parameter in model.named_parameters()}
    return [
        [names.get(id(p), f"group{number}.{place}") for place, p in enumerate(group["params"])]
        for number, group in enumerate(groups)
    ]


def parameter_shapes(model: nn.Module) -> dict[str, list[int]]:
    """Shapes of the model's parameters by name."""
    named = model.named_parameters()
    return {clean_name(name): list(p.shape) for name, p in named if not is_lazy(p)}


def resized(model: nn.Module, packed: dict[str, Any]) -> dict[str, str]:
    """Parameters whose shape in the checkpoint is another than here, by name, a phrase each."""
    there = packed["shapes"]
    return {
        name: f"parameter '{name}' is {there[name]} there and {shape} here"
        for name, shape in parameter_shapes(model).items()
        if there.get(name, shape) != shape
    }


def pack(engine: Engine, base: Optimizer, handover: Handover | None) -> dict[str, Any]:
    """The factors and counters of every layer, and what identifies the model."""
    names = parameter_names(engine.model, base.param_groups)
    layers: dict[str, Any] = {}
    shapes = parameter_shapes(engine.model)
    for name, layer in engine.layers.items():
        shape, record = layer.view.shape, engine.records[name]
        layers[name] = {
            "shape": [shape.stack, shape.outputs, shape.inputs],
            "updates": record.updates,
            "last_update": record.last_update,
            "state": dict(engine.ownership.gathered(name, record.state)),
            "momentum": dict(record.momentum),
        }
    return {
        "method": engine.method.name,
        "base": type(base).__name__,
        "step": engine.index,
        "sizes": list(engine.sizes),
        "heard": engine.heard.state_dict(),
        "resting": engine.resting,
        "hybrid": handover.state_dict() if handover is not None else None,
        "layers": layers,
        "pending": pending.pack(engine.capture),
        "parameters": names,
        "shapes": {name: shapes[name] for group in names for name in group if name in shapes},
    }


def without_factors(names: list[list[str]]) -> dict[str, Any]:
    """What stands in for the factors that a plain optimizer's checkpoint lacks."""
    return {
        **dict.fromkeys(("method", "base", "resting", "hybrid")),
        **{key: {} for key in ("layers", "pending", "shapes")},
        "heard": Meter("the gradient's size").state_dict(),
        "step": 0,
        "sizes": [],
        "parameters": names,
    }


def differences(
    engine: Engine, base: Optimizer, names: list[list[str]], packed: dict[str, Any]
) -> list[str]:
    """In what a checkpoint differs from this model and optimizer, one phrase each."""
    out: list[str] = []
    if packed["base"] != type(base).__name__:
        out.append(f"its base optimizer was {packed['base']}, this is {type(base).__name__}")
    if packed["method"] != engine.method.name:
        out.append(f"it was saved by method '{packed['method']}', this is '{engine.method.name}'")
    saved, own = packed["layers"], engine.layers
    out += [f"it has layer '{name}', this model does not" for name in saved if name not in own]
    out += [f"it lacks layer '{name}'" for name in own if name not in saved]
    for name in own:
        shape = own[name].view.shape
        here = [shape.stack, shape.outputs, shape.inputs]
        if name in saved and list(saved[name]["shape"]) != here:
            out.append(f"layer '{name}' is {saved[name]['shape']} there and {here} here")
    out = out or list(other_states(engine, saved).values())
    out = out or momentum_differences(engine, saved)
    out = out or list(resized(engine.model, packed).values())
    if packed["parameters"] != names:
        out += group_differences(packed["parameters"], names)
    return out


def other_states(engine: Engine, saved: dict[str, Any]) -> dict[str, str]:
    """Layers whose factors in the checkpoint are of another kind than here, a phrase each."""
    out: dict[str, str] = {}
    for name, layer in engine.layers.items():
        state = saved[name]["state"] if name in saved else {}
        view = layer.view
        fault = engine.method.misfit(state, view.shape, view.weight.dtype) if state else None
        if fault is not None:
            out[name] = f"layer '{name}' {fault}"
    return out


def momentum_differences(engine: Engine, saved: dict[str, Any]) -> list[str]:
    """Whether momentum is kept there and not here, or here and not there."""
    there = any(layer["momentum"] for layer in saved.values())
    here = engine.momentum is not None
    began = any(layer["updates"] for layer in saved.values())
    if there == here or not began:
        return []
    return ["it has a momentum, this has momentum=None" if there else "it lacks the momentum"]


def group_differences(saved: list[list[str]], own: list[list[str]]) -> list[str]:
    """How the parameters of the groups differ."""
    there = {name for group in saved for name in group}
    here = {name for group in own for name in group}
    out = [f"it has parameter '{name}', this optimizer does not" for name in sorted(there - here)]
    out += [f"it lacks parameter '{name}'" for name in sorted(here - there)]
    return out or ["its parameters are grouped or ordered differently"]


def load(
    engine: Engine,
    base: Optimizer,
    loaded: dict[str, Any],
    strict: bool,
    handover: Handover | None,
) -> list[str]:
    """Load a checkpoint, whose tensors become the optimizer's; in what it differs, a phrase each.

    Raises:
        ValueError: `strict` and the checkpoint differs; nothing is changed then.
    """
    packed = loaded.pop(KEY, None)
    if packed is None and strict:
        raise ValueError(
            "this checkpoint has no factors: it was saved by a plain optimizer. Pass "
            "strict=False to load the base optimizer's state and start with new factors. (What "
            "torch.distributed.checkpoint gets and sets is the state of optimizer.base; beside it, "
            "save optimizer.factors)"
        )
    names = parameter_names(engine.model, base.param_groups)
    packed = without_factors(names) if packed is None else packed
    different = check(engine, base, packed, strict, handover)
    resizes = resized(engine.model, packed)
    base.load_state_dict(base_part(base, loaded, packed, names, resizes))
    unpack_all(engine, base, packed, handover)
    return different


def load_factors(
    engine: Engine, base: Optimizer, packed: dict[str, Any], handover: Handover | None
) -> None:
    """Load what `pack` returned, and leave the base as it is.

    Raises:
        ValueError: It is of another model or optimizer; nothing is changed then.
    """
    check(engine, base, packed, True, handover)
    unpack_all(engine, base, packed, handover)


def check(
    engine: Engine,
    base: Optimizer,
    packed: dict[str, Any],
    strict: bool,
    handover: Handover | None,
) -> list[str]:
    """In what a checkpoint differs; raises where it can't be loaded, or if `strict` and it does."""
    check_packed(packed, KEY)
    names = parameter_names(engine.model, base.param_groups)
    different = differences(engine, base, names, packed)
    if packed["resting"] is not None and handover is None:
        different.append("it was saved after its hybrid switch had handed over, this has no hybrid")
    if different and strict:
        raise ValueError(
            "this checkpoint is of another model or optimizer: "
            + "; ".join(different)
            + ". Pass strict=False to load what matches by name"
        )
    return different


def unpack_all(
    engine: Engine, base: Optimizer, packed: dict[str, Any], handover: Handover | None
) -> None:
    """Load the hybrid switch and the factors."""
    if handover is not None:
        unpack_phase(engine, base, handover, packed)
    unpack(engine, packed)


def unpack_phase(
    engine: Engine, base: Optimizer, handover: Handover, packed: dict[str, Any]
) -> None:
    """Load the hybrid switch, and rest or not as the checkpoint's engine did."""
    known = packed if packed["method"] == engine.method.name else {}
    handover.load_state_dict(known.get("hybrid"))
    resting = known.get("resting")
    if (resting is None) != (engine.resting is None):
        optimized = {id(p) for group in base.param_groups for p in group["params"]}
        engine.rest(resting is not None, optimized)
    engine.resting = resting
    engine.pause(handover.trying)


def unpack(engine: Engine, packed: dict[str, Any]) -> None:
    """Load factors into the layers of the same name and shape; the others start anew."""
    engine.index = packed["step"]
    engine.sizes = tuple(packed["sizes"])
    engine.heard.load_state_dict(packed["heard"])
    same_method = packed["method"] == engine.method.name
    others = other_states(engine, packed["layers"]) if same_method else {}
    shown: dict[str, Any] = {}
    for name, layer in engine.layers.items():
        saved, shape = packed["layers"].get(name), layer.view.shape
        engine.records[name] = Record()
        here = [shape.stack, shape.outputs, shape.inputs]
        fits = same_method and name not in others
        if saved is not None and fits and list(saved["shape"]) == here:
            held = saved["state"] if engine.ownership.holds(name) else {}
            state = {key: tensor.clone() for key, tensor in held.items()}
            momentum = saved["momentum"] if engine.momentum is not None else {}
            engine.records[name] = Record(state, saved["updates"], saved["last_update"], momentum)
            shown[name] = packed["pending"].get(name, {})
    engine.capture.clear()
    engine.listen()
    pending.restore(engine.capture, shown)


def base_part(
    base: Optimizer,
    loaded: dict[str, Any],
    packed: dict[str, Any],
    own: list[list[str]],
    resized: Collection[str],
) -> dict[str, Any]:
    """The base's part of a checkpoint, fit for this base by parameter name.

    Parameters that the checkpoint lacks or that `resized` names start with empty state. Group
    options come from it where the numbers of groups agree. A base of another class gives nothing.
    """
    current = copy.deepcopy(base.state_dict()["param_groups"])
    if packed["base"] not in {None, type(base).__name__}:
        return {"state": {}, "param_groups": current}
    saved = packed["parameters"]
    if saved == own and not resized:
        return loaded
    number = {
        name: index
        for names, group in zip(saved, loaded["param_groups"], strict=True)
        for name, index in zip(names, group["params"], strict=True)
    }
    if len(current) == len(loaded["param_groups"]):
        for group, there in zip(current, loaded["param_groups"], strict=True):
            group.update({key: value for key, value in there.items() if key != "params"})
    state = {
        index: loaded["state"][number[name]]
        for names, group in zip(own, current, strict=True)
        for name, index in zip(names, group["params"], strict=True)
        if number.get(name) in loaded["state"] and name not in resized
    }
    return {"state": state, "param_groups": current}
