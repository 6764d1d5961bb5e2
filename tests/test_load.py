"""Loading checkpoints that do not fit: every error by its text, and what strict=False loads."""

import copy

import pytest
import torch
from torch import nn

import mkor
from mismatches import flat, mlp, sgd, train


def saved(model_of=mlp, groups=1):
    """A model and its trained optimizer."""
    model = model_of()
    base = sgd(model)
    if groups == 2:
        base = torch.optim.SGD(
            [{"params": model[0].parameters()}, {"params": model[2].parameters()}],
            lr=0.1,
            momentum=0.9,
        )
    optimizer = mkor.MKOR(model, base)
    train(model, optimizer)
    return optimizer


def deeper():
    torch.manual_seed(1)
    return nn.Sequential(*mlp(), nn.Tanh(), nn.Linear(3, 3))


def wider():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3))


def of_another_method():
    state = saved().state_dict()
    state["preconditioner"]["method"] = "kfac"
    return state


MISMATCHES = {
    "method": (of_another_method, ["it was saved by method 'kfac', this is 'mkor'"]),
    "more layers": (
        lambda: saved(deeper).state_dict(),
        [
            "it has layer '4', this model does not",
            "it has parameter '4.bias', this optimizer does not",
            "it has parameter '4.weight', this optimizer does not",
        ],
    ),
    "fewer layers": (
        lambda: saved(lambda: nn.Sequential(nn.Linear(5, 4))).state_dict(),
        ["it lacks layer '2'", "it lacks parameter '2.bias'", "it lacks parameter '2.weight'"],
    ),
    "shapes": (
        lambda: saved(wider).state_dict(),
        ["layer '0' is [1, 6, 6] there and [1, 4, 6] here"],
    ),
    "groups": (
        lambda: saved(groups=2).state_dict(),
        ["its parameters are grouped or ordered differently"],
    ),
}


@pytest.mark.parametrize("name", MISMATCHES)
def test_a_checkpoint_of_another_model(name):
    make, phrases = MISMATCHES[name]
    optimizer = saved()
    state, before = make(), copy.deepcopy(flat(optimizer.state_dict()))
    with pytest.raises(ValueError, match="this checkpoint is of another model or optim") as caught:
        optimizer.load_state_dict(state)
    for phrase in phrases:
        assert phrase in str(caught.value)
    assert str(caught.value).endswith("Pass strict=False to load what matches by name")
    assert flat(optimizer.state_dict()) == before


def test_a_checkpoint_of_a_plain_optimizer():
    model = mlp()
    plain = sgd(model)
    train(model, plain)
    optimizer = saved()
    before = flat(optimizer.state_dict())
    message = "this checkpoint has no factors: it was saved by a plain optimizer. Pass strict=False"
    with pytest.raises(ValueError, match=message):
        optimizer.load_state_dict(plain.state_dict())
    assert flat(optimizer.state_dict()) == before
    loaded = []
    optimizer.register_load_state_dict_post_hook(lambda _: loaded.append(True))
    optimizer.load_state_dict(plain.state_dict(), strict=False)
    assert flat(optimizer.base.state_dict()) == flat(plain.state_dict())
    assert loaded == [True]
    # New factors, as promised, and the schedule from its start.
    assert [info.updates for info in optimizer.layers()] == [0, 0]
    assert optimizer.state_dict()["preconditioner"]["step"] == 0
    train(optimizer.model, optimizer)
    assert [info.updates for info in optimizer.layers()] == [2, 2]


@pytest.mark.parametrize("name", ["more layers", "fewer layers", "groups"])
def test_what_matches_by_name_is_loaded(name):
    state = MISMATCHES[name][0]()
    optimizer = mkor.MKOR(model := mlp(), sgd(model))
    optimizer.load_state_dict(state, strict=False)
    there, here = state["preconditioner"], optimizer.state_dict()["preconditioner"]
    shared = {"0"} if name == "fewer layers" else {"0", "2"}
    for layer in here["layers"]:
        if layer in shared:
            assert flat(here["layers"][layer]) == flat(there["layers"][layer])
        else:
            assert here["layers"][layer]["updates"] == 0
    momentum = {
        key: state["state"][number]["momentum_buffer"]
        for names, group in zip(there["parameters"], state["param_groups"], strict=True)
        for key, number in zip(names, group["params"], strict=True)
    }
    for key, p in model.named_parameters():
        if key.split(".")[0] in shared:
            assert torch.equal(optimizer.state[p]["momentum_buffer"], momentum[key])
        else:
            assert not optimizer.state[p]
    train(model, optimizer)


def adamw_checkpoint():
    model = mlp()
    optimizer = mkor.MKOR(model, torch.optim.AdamW(model.parameters(), lr=0.01))
    train(model, optimizer)
    return optimizer.state_dict()


def test_what_differs_is_logged(caplog):
    state = saved().state_dict()
    saved().load_state_dict(state)
    assert caplog.messages == []
    model = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3), nn.Linear(3, 2))
    mkor.MKOR(model, sgd(model)).load_state_dict(state, strict=False)
    (line,) = caplog.messages
    assert line.startswith("checkpoint differs: it lacks layer '3'; it lacks parameter '3.bias'")


def test_a_checkpoint_of_another_base_changes_nothing():
    optimizer = saved()
    before = flat(copy.deepcopy(optimizer.state_dict()))
    with pytest.raises(ValueError, match="its base optimizer was AdamW, this is SGD"):
        optimizer.load_state_dict(adamw_checkpoint())
    assert flat(optimizer.state_dict()) == before


def test_factors_load_under_another_base_unless_strict():
    model = mlp()
    optimizer = mkor.MKOR(model, sgd(model))
    state = adamw_checkpoint()
    optimizer.load_state_dict(state, strict=False)
    loaded = optimizer.state_dict()["preconditioner"]["layers"]
    assert flat(loaded) == flat(state["preconditioner"]["layers"])
    assert optimizer.param_groups[0]["lr"] == 0.1 and not optimizer.state
    train(model, optimizer)


@pytest.mark.parametrize("state", [None, {}, {"0.weight": 1}, [1]])
def test_what_is_no_checkpoint_of_an_optimizer(state):
    with pytest.raises(ValueError, match="keys 'state' and 'param_groups'; got"):
        saved().load_state_dict(state)


@pytest.mark.parametrize("part", [3, {}, {"method": "mkor", "base": "SGD", "layers": {}}])
@pytest.mark.parametrize("strict", [True, False])
def test_factors_that_are_not_whole_change_nothing(part, strict):
    optimizer = saved()
    state = {**saved().state_dict(), "preconditioner": part}
    before = flat(copy.deepcopy(optimizer.state_dict()))
    fault = "lacks .*step, .*strict" if isinstance(part, dict) else "is 3 and must be a dict"
    with pytest.raises(ValueError, match=rf"state_dict\['preconditioner'\] {fault}"):
        optimizer.load_state_dict(state, strict=strict)
    assert flat(optimizer.state_dict()) == before


def test_a_checkpoint_is_saved_after_a_module_was_replaced():
    optimizer = saved()
    optimizer.model[2] = nn.Linear(4, 3)
    optimizer.add_param_group({"params": optimizer.model[2].parameters()})
    train(optimizer.model, optimizer)
    names = optimizer.state_dict()["preconditioner"]["parameters"]
    assert names == [["0.weight", "0.bias", "group0.2", "group0.3"], ["2.weight", "2.bias"]]
