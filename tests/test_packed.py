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
    "a switch that is a list": (
        put("hybrid", [1]),
        f"{WHERE}['hybrid'] is [1] and must be a dict, or None",
    ),
    "a switch without a course": (drop("hybrid", "course"), f"{WHERE}['hybrid'] lacks course"),
    "a course of more trials than there is time for": (
        put("hybrid", "course", "trials", 10**12),
        f"{WHERE}['hybrid']['course']['trials'] is 1000000000000 and must be an integer from 0",
    ),
    "a loss that is not a number": (
        put("hybrid", "course", "loss", True),
        f"{WHERE}['hybrid']['course']['loss'] is True and must be a number, or None",
    ),
    "a phase that is a word": (
        put("hybrid", "course", "preconditioning", "x"),
        f"{WHERE}['hybrid']['course']['preconditioning'] is 'x' and must be True or False",
    ),
    "times that are a number": (
        put("hybrid", "course", "seconds", 3),
        f"{WHERE}['hybrid']['course']['seconds'] is 3 and must be a list of numbers",
    ),
    "a window of words": (
        put("hybrid", "meter", "total", "x"),
        f"{WHERE}['hybrid']['meter']['total'] is 'x' and must be a number",
    ),
    "a window without calls": (
        drop("hybrid", "shown", "calls"),
        f"{WHERE}['hybrid']['shown'] lacks calls",
    ),
    "no size heard": (put("heard", {}), f"{WHERE}['heard'] lacks total, finite, calls"),
    "sizes that are none": (
        put("sizes", None),
        f"{WHERE}['sizes'] is None and must be a list of numbers",
    ),
    "statistics that are a word": (
        put("pending", "x"),
        f"{WHERE}['pending'] is 'x' and must be a dict",
    ),
    "statistics of a layer that are a list": (
        put("pending", "0", [2]),
        f"{WHERE}['pending']['0'] is [2] and must be a dict",
    ),
    "a statistic that is a number": (
        put("pending", "0", {"inputs": 3}),
        f"{WHERE}['pending']['0']['inputs'] is 3 and must be a tensor",
    ),
    "calls of numbers": (
        put("pending", "0", {"calls": [3], "rows": 2}),
        f"{WHERE}['pending']['0']['calls'] is [3] and must be a list of dicts of tensors",
    ),
    "sizes of a parameter that are a tensor": (
        put("shapes", "0.weight", torch.ones(2)),
        f"{WHERE}['shapes'] is a dict of",
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
    optimizer = sgd(model, hybrid=mkor.HybridSwitch(at_step=50))
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
    told = "lacks method, base, step, layers, heard" if packed == {} else "must be a dict"
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


@pytest.mark.parametrize(
    ("key", "value", "told"),
    [
        ("meter", 3, r"\['meter'\] is 3 and must be a dict"),
        ("meter", {}, r"\['meter'\] lacks total, finite, calls"),
        ("first", "x", r"\['first'\] is 'x' and must be a number, or None"),
        ("windows", None, r"\['windows'\] is None and must be an integer of at least 0"),
        ("smoothed", [1], r"\['smoothed'\] is \[1\] and must be a number"),
        ("last_epoch", "q", r"\['last_epoch'\] is 'q' and must be an integer of at least -1"),
    ],
)
def test_a_damaged_state_of_a_scheduler(key, value, told):
    scheduler = mkor.KneePointLR(torch.optim.SGD(mlp().parameters(), lr=0.1))
    scheduler.step(3.0)
    before = scheduler.state_dict()
    with pytest.raises(ValueError, match=rf"^state_dict{told}, so it is not what KneePointLR"):
        scheduler.load_state_dict({**before, key: value})
    assert scheduler.state_dict() == before
