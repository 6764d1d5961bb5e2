"""A damaged checkpoint is refused before anything changes: its place, the rule and the remedy."""

import copy

import pytest
import torch

import mkor
from small_runs import data, mlp, same, sgd, train

REMEDY = (
    "so it is not what state_dict() returned: load a whole checkpoint, or delete 'preconditioner'"
)


def put(*path):
    """Replaces what stands at all but the last of `path` by the last."""

    def change(packed):
        *way, last, value = path
        for key in way:
            packed = packed[key]
        packed[last] = value

    return change


def drop(*path):
    def change(packed):
        *way, last = path
        for key in way:
            packed = packed[key]
        del packed[last]

    return change


WHERE = "state_dict['preconditioner']"
DAMAGE = {
    "a negative step": (
        put("step", -3),
        f"{WHERE}['step'] is -3 and must be an integer of at least 0",
    ),
    "half a step": (put("step", 1.5), f"{WHERE}['step'] is 1.5 and must be an integer"),
    "no step": (drop("step"), f"{WHERE} lacks step"),
    "a list of layers": (put("layers", [1, 2]), f"{WHERE}['layers'] is [1, 2] and must be a dict"),
    "no layer": (put("layers", "0", None), f"{WHERE}['layers']['0'] is None and must be a dict"),
    "no state": (drop("layers", "2", "state"), f"{WHERE}['layers']['2'] lacks state"),
    "a factor that is a list": (
        put("layers", "0", "state", "left_inverse", [1.0]),
        f"{WHERE}['layers']['0']['state'] is a dict of Tensor, list and must be a dict of tensors",
    ),
    "a momentum that is a number": (
        put("layers", "0", "momentum", 3),
        f"{WHERE}['layers']['0']['momentum'] is 3 and must be a dict of tensors",
    ),
    "updates that are a word": (
        put("layers", "0", "updates", "many"),
        f"{WHERE}['layers']['0']['updates'] is 'many' and must be an integer of at least 0",
    ),
    "a last update before the first": (
        put("layers", "0", "last_update", -1),
        f"{WHERE}['layers']['0']['last_update'] is -1 and must be an integer of at least 0, or",
    ),
    "two sizes": (
        put("layers", "0", "shape", [1, 2]),
        f"{WHERE}['layers']['0']['shape'] is [1, 2] and must be a list of three sizes",
    ),
    "parameters by number": (
        put("parameters", [[0, 1]]),
        f"{WHERE}['parameters'] is [[0, 1]] and must be a list of lists of names",
    ),
}


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize(("damage", "text"), DAMAGE.values(), ids=DAMAGE)
def test_damage_is_named(damage, text, strict):
    model = mlp()
    optimizer = sgd(model)
    train(model, optimizer, data(3))
    saved = copy.deepcopy(optimizer.state_dict())
    damage(saved["preconditioner"])
    twin = copy.deepcopy((model, optimizer))
    with pytest.raises(ValueError) as error:
        optimizer.load_state_dict(saved, strict=strict)
    assert text in str(error.value) and REMEDY in str(error.value)
    for pair in ((model, optimizer), twin):
        train(*pair, data(5)[3:])
    assert same(model, twin[0])
    assert optimizer.layers() == twin[1].layers()


@pytest.mark.parametrize("packed", [{}, 3, [1.0]], ids=str)
def test_factors_that_are_no_dict_or_empty(packed):
    model = mlp()
    optimizer = sgd(model)
    saved = {**optimizer.state_dict(), "preconditioner": packed}
    told = "lacks method, base, step, layers, parameters" if packed == {} else "must be a dict"
    with pytest.raises(ValueError, match=told):
        optimizer.load_state_dict(saved)


def test_a_momentum_without_values():
    model = mlp()
    optimizer = mkor.auto(model, lr=0.01)
    train(model, optimizer, data(2))
    saved = copy.deepcopy(optimizer.state_dict())
    momentum = saved["preconditioner"]["layers"]["0"]["momentum"]
    saved["preconditioner"]["layers"]["0"]["momentum"] = {
        key: tensor.to("meta") for key, tensor in momentum.items()
    }
    with pytest.raises(ValueError, match=r"layer '0' .* 'meta' and have no values.*map_location"):
        optimizer.load_state_dict(saved)
    assert torch.isfinite(model[0].weight).all()
