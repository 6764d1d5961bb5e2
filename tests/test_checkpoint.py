"""The parts of a checkpoint: names, packing, differences, matching by name."""

import copy

import pytest
import torch
from torch import nn

import mkor
from mkor import checkpoint


def net():
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


def trained(model=None, steps=3, **options):
    model = net() if model is None else model
    base = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    optimizer = mkor.MKOR(model, base, **options)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(5, 3)).square().mean().backward()
        optimizer.step()
    return model, optimizer


def packed_of(optimizer):
    return checkpoint.pack(optimizer._engine, optimizer.base, None)


def base_part(other, base, saved, own):
    """The state of `base` fit for `other`."""
    packed = {"base": type(base).__name__, "parameters": saved}
    return checkpoint.base_part(other, base.state_dict(), packed, own, ())


def names_of(optimizer):
    return checkpoint.parameter_names(optimizer.model, optimizer.param_groups)


class Wrapper(nn.Module):
    """As DDP's: one child of the name `module`."""

    def __init__(self, module):
        super().__init__()
        self.module = module


def test_parameter_names_follow_the_groups_without_prefixes_of_wrappers():
    model = Wrapper(net())
    groups = [
        {"params": [model.module[2].weight]},
        {"params": [model.module[0].bias, model.module[0].weight]},
    ]
    assert checkpoint.parameter_names(model, groups) == [["2.weight"], ["0.bias", "0.weight"]]


def test_pack_is_plain_data_that_torch_loads_safely(tmp_path):
    _, optimizer = trained()
    packed = packed_of(optimizer)
    torch.save(packed, tmp_path / "state.pt")
    loaded = torch.load(tmp_path / "state.pt", weights_only=True)
    assert loaded["method"] == "mkor" and loaded["step"] == 3
    assert loaded["parameters"] == [["0.weight", "0.bias", "2.weight", "2.bias"]]
    assert list(loaded["layers"]) == ["0", "2"]
    assert loaded["layers"]["0"]["shape"] == [1, 4, 4]
    assert loaded["layers"]["2"]["updates"] == 3 and loaded["layers"]["2"]["last_update"] == 2
    for name, layer in packed["layers"].items():
        for key, tensor in layer["state"].items():
            assert torch.equal(loaded["layers"][name]["state"][key], tensor)


def test_unpack_copies_factors_and_counts():
    _, first = trained()
    packed = packed_of(first)
    _, second = trained(steps=1)
    checkpoint.unpack(second._engine, packed)
    assert second._engine.index == 3
    for name, record in first._engine.records.items():
        other = second._engine.records[name]
        assert (other.updates, other.last_update) == (record.updates, record.last_update)
        for key, tensor in record.state.items():
            assert torch.equal(other.state[key], tensor)
            assert other.state[key].data_ptr() != tensor.data_ptr()


@pytest.mark.parametrize(("index", "armed"), [(2, True), (3, False), (5, True), (10, True)])
def test_unpack_listens_if_the_next_step_updates(index, armed):
    _, optimizer = trained(warmup_steps=3, factor_update_steps=5)
    packed = packed_of(optimizer)
    packed["step"] = index
    checkpoint.unpack(optimizer._engine, packed)
    assert optimizer._engine.capture.armed is armed


@pytest.mark.parametrize("change", ["method", "shape", "missing"])
def test_unpack_starts_anew_what_does_not_fit(change):
    _, optimizer = trained()
    packed = copy.deepcopy(packed_of(optimizer))
    if change == "method":
        packed["method"] = "other"
    elif change == "shape":
        packed["layers"]["0"]["shape"] = [1, 9, 9]
    else:
        del packed["layers"]["0"]
    checkpoint.unpack(optimizer._engine, packed)
    records = optimizer._engine.records
    assert records["0"].state == {} and records["0"].updates == 0
    assert bool(records["2"].state) is (change != "method")


def test_no_differences_to_itself():
    _, optimizer = trained()
    packed = packed_of(optimizer)
    assert (
        checkpoint.differences(optimizer._engine, optimizer.base, names_of(optimizer), packed) == []
    )


def test_differences_name_each_thing():
    _, optimizer = trained()
    packed = copy.deepcopy(packed_of(optimizer))
    packed["method"] = "kfac"
    packed["layers"]["extra"] = packed["layers"].pop("0")
    packed["layers"]["2"]["shape"] = [1, 7, 7]
    packed["parameters"] = [["extra.weight", "0.bias", "2.weight", "2.bias"]]
    told = checkpoint.differences(optimizer._engine, optimizer.base, names_of(optimizer), packed)
    assert len(told) == 6
    for part in (
        "'kfac', this is 'mkor'",
        "has layer 'extra'",
        "lacks layer '0'",
        "'2' is [1, 7, 7] there and [1, 2, 5] here",
        "has parameter 'extra.weight'",
        "lacks parameter '0.weight'",
    ):
        assert any(part in phrase for phrase in told), part


def test_reordered_parameters_are_a_difference():
    own = [["a", "b"], ["c"]]
    for saved in ([["b", "a"], ["c"]], [["a", "b", "c"]]):
        assert len(checkpoint.group_differences(saved, own)) == 1


def two_groups(model, order):
    parts = {"first": list(model[0].parameters()), "last": list(model[2].parameters())}
    lrs = {"first": 0.1, "last": 0.2}
    groups = [{"params": parts[name], "lr": lrs[name]} for name in order]
    return torch.optim.SGD(groups, lr=1.0, momentum=0.9)


def test_base_part_finds_state_by_name():
    model = net()
    base = two_groups(model, ["first", "last"])
    model(torch.randn(5, 3)).square().mean().backward()
    base.step()
    saved_names = checkpoint.parameter_names(model, base.param_groups)
    other = two_groups(model, ["last", "first"])
    own_names = checkpoint.parameter_names(model, other.param_groups)
    matched = base_part(other, base, saved_names, own_names)
    other.load_state_dict(matched)
    for parameter in model.parameters():
        expected = base.state[parameter]["momentum_buffer"]
        assert torch.equal(other.state[parameter]["momentum_buffer"], expected)


def test_base_part_starts_anew_what_the_checkpoint_lacks():
    model = net()
    base = torch.optim.SGD(model[0].parameters(), lr=0.3, momentum=0.9)
    model(torch.randn(5, 3)).square().mean().backward()
    base.step()
    saved_names = checkpoint.parameter_names(model, base.param_groups)
    other = two_groups(model, ["last", "first"])
    own_names = checkpoint.parameter_names(model, other.param_groups)
    matched = base_part(other, base, saved_names, own_names)
    other.load_state_dict(matched)
    assert set(other.state) == set(model[0].parameters())
    # The number of groups differs, so their options stay.
    assert [group["lr"] for group in other.param_groups] == [0.2, 0.1]


def test_base_part_takes_group_options_where_the_groups_agree_in_number():
    model = net()
    base = torch.optim.SGD(model[0].parameters(), lr=0.3, momentum=0.5)
    saved_names = checkpoint.parameter_names(model, base.param_groups)
    other = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9)
    own_names = checkpoint.parameter_names(model, other.param_groups)
    matched = base_part(other, base, saved_names, own_names)
    assert matched["param_groups"][0]["lr"] == 0.3
    assert matched["param_groups"][0]["momentum"] == 0.5
    assert matched["param_groups"][0]["params"] == [0, 1, 2, 3]


def test_base_part_takes_nothing_from_a_base_of_another_class():
    model = net()
    base = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    model(torch.randn(5, 3)).square().mean().backward()
    base.step()
    other = torch.optim.AdamW(model.parameters(), lr=0.01)
    names = checkpoint.parameter_names(model, other.param_groups)
    matched = base_part(other, base, names, names)
    assert matched == {"state": {}, "param_groups": other.state_dict()["param_groups"]}
