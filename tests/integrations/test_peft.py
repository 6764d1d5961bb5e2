"""LoRA by PEFT: adapters are preconditioned, the frozen base is left as it is."""

import copy

import pytest
import torch

import mkor
from integrations.common import adamw, assert_agree, batches, build, plain_loop, tiny

pytest.importorskip("transformers")
peft = pytest.importorskip("peft")


def adapted():
    torch.manual_seed(1)
    config = peft.LoraConfig(r=2, target_modules=["query", "value"], modules_to_save=["classifier"])
    return peft.get_peft_model(tiny(), config)


def test_adapters_are_preconditioned_and_the_base_is_left():
    model = adapted()
    before = copy.deepcopy(model.state_dict())
    optimizer = build(model)
    plain_loop(model, optimizer, batches(5))
    layers = {i.name: i for i in optimizer.layers()}
    on = [name for name, info in layers.items() if info.preconditioned]
    assert len(on) == 9  # A and B of two projections in two layers, and the classifier
    assert all("lora" in name or "modules_to_save" in name for name in on)
    assert all(layers[name].updates == 4 for name in on)
    frozen = layers["base_model.model.bert.encoder.layer.0.attention.self.query.base_layer"]
    assert frozen.reason == "its weight is not in the base optimizer"
    trains = {name for name, p in model.named_parameters() if p.requires_grad}
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]) == (name not in trains), name


def test_a_base_that_holds_frozen_parameters_too():
    """`model.parameters()`, as many write: what doesn't train shows nothing and changes nothing."""
    model, other = adapted(), adapted()
    options = {"warmup_steps": 2, "factor_update_steps": 2}
    optimizer = mkor.MKOR(model, adamw(model.parameters()), **options)
    reference = build(other)
    plain_loop(model, optimizer, batches(5))
    plain_loop(other, reference, batches(5))
    for (name, one), two in zip(model.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(one, two), name
    trained = {info.name for info in optimizer.layers() if info.updates}
    assert trained == {info.name for info in reference.layers() if info.updates}


def test_adapters_and_factors_are_saved_and_go_on(tmp_path):
    data = batches(6)
    model = adapted()
    optimizer = build(model)
    plain_loop(model, optimizer, data[:3])
    model.save_pretrained(tmp_path)
    torch.save(optimizer.state_dict(), tmp_path / "optimizer.pt")
    plain_loop(model, optimizer, data[3:])

    rest = peft.PeftModel.from_pretrained(tiny(), tmp_path, is_trainable=True)
    resumed = build(rest)
    resumed.load_state_dict(torch.load(tmp_path / "optimizer.pt", weights_only=True))
    plain_loop(rest, resumed, data[3:])
    assert_agree(model, optimizer, rest, resumed)


def test_an_adapter_that_is_added_later():
    model = adapted()
    optimizer = build(model)
    plain_loop(model, optimizer, batches(2))
    torch.manual_seed(2)
    model.add_adapter("second", peft.LoraConfig(r=2, target_modules=["key"]))
    model.set_adapter("second")
    fresh = [p for name, p in model.named_parameters() if "second" in name]
    optimizer.add_param_group({"params": fresh})
    plain_loop(model, optimizer, batches(3))
    updated = {info.name: info.updates for info in optimizer.layers() if ".second" in info.name}
    assert len(updated) == 4 and all(updated.values())
