"""LoRA and activation checkpointing in each framework, and loss scalers where they run on a CPU."""

import contextlib

import pytest
import torch

import mkor
from integrations import test_accelerate, test_huggingface, test_lightning
from integrations.common import assert_agree, batches, build, plain_loop, tiny
from integrations.test_accelerate import fresh_state  # noqa: F401  # before each test

pytestmark = test_lightning.pytestmark


def lora():
    peft = pytest.importorskip("peft")
    torch.manual_seed(1)
    config = peft.LoraConfig(r=2, target_modules=["query", "value"], modules_to_save=["classifier"])
    return peft.get_peft_model(tiny(), config)


def checkpointing():
    model = tiny()
    model.activation_checkpointing_enable()
    return model


MODELS = {"lora": (lora, lora), "activation checkpointing": (checkpointing, tiny)}
"""What makes the model, and what makes that of the plain loop."""


def by_accelerate(model, folder):
    optimizer = build(model)
    parts = test_accelerate.prepared(model, optimizer, 6)
    model.train()
    test_accelerate.loop(*parts, batches(6))
    return optimizer


def by_trainer(model, folder):
    optimizer = build(model)
    test_huggingface.trainer(folder, model, optimizer, remove_unused_columns=False).train()
    return optimizer


def by_lightning(model, folder, automatic=True):
    module = test_lightning.Module(automatic=automatic)
    module.model = model
    return test_lightning.fit(module).optimizers[0]


def by_lightning_by_hand(model, folder):
    return by_lightning(model, folder, automatic=False)


FRAMEWORKS = [by_accelerate, by_trainer, by_lightning, by_lightning_by_hand]


@pytest.mark.parametrize("framework", FRAMEWORKS, ids=lambda framework: framework.__name__)
@pytest.mark.parametrize("kind", MODELS)
def test_a_framework_does_what_a_loop_does(tmp_path, kind, framework):
    make, plain = MODELS[kind]
    model, other = make(), plain()
    optimizer = framework(model, tmp_path)
    reference = build(other)
    other.train()
    plain_loop(other, reference, batches(6))
    assert_agree(model, optimizer, other, reference, 1e-6)


BAD = 2
"""The step whose loss is infinite; the scaler leaves it out and halves its scale."""


def scaler():
    return torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)


def spoil(model):
    """Let the loss of one forward pass be infinite."""
    calls = iter(range(100))

    def hook(module, args, output):
        if next(calls) == BAD:
            output.loss = output.loss * torch.inf
        return output

    model.register_forward_hook(hook)
    return model


def switch():
    return mkor.HybridSwitch(window=100)


def assert_left_out(model, optimizer, lrs):
    """The steps that were taken are those of a loop over the other batches, in the switch too."""
    other = tiny()
    reference = build(other, hybrid=switch())
    for number, batch in enumerate(batches(6)):
        if number == BAD:
            continue
        reference.param_groups[0]["lr"] = lrs[number]
        reference.set_mask(batch["attention_mask"])
        loss = other(**batch).loss
        loss.backward()
        reference.observe_loss(loss)
        reference.step()
        reference.zero_grad()
    assert_agree(model, optimizer, other, reference, 1e-5)
    optimizer.zero_grad()
    seen, expected = (o._handover.state_dict() for o in (optimizer, reference))
    assert seen["meter"] == pytest.approx(expected["meter"], rel=1e-5)
    assert seen["meter"]["calls"] == 5 and seen["shown"]["calls"] == 0


class Rates:
    """Keeps the learning rate of each step."""

    def __init__(self, optimizer):
        self.seen = []
        self.forward = lambda *_: self.seen.append(optimizer.param_groups[0]["lr"])


def test_a_loss_scaler_in_the_trainer(tmp_path):
    """fp16 needs a GPU, so the scaler alone is put where the Trainer's fp16 puts it."""
    model = spoil(tiny())
    optimizer = build(model, hybrid=switch())
    rates = Rates(optimizer)
    model.register_forward_pre_hook(rates.forward)
    trainer = test_huggingface.trainer(tmp_path, model, optimizer)
    trainer.accelerator.scaler = own = scaler()
    trainer.train()
    assert own.get_scale() == 2048.0  # doubled, halved, doubled
    assert_left_out(model, optimizer, rates.seen)


class Zeroing(test_lightning.Module):
    """Keeps the gradients that it clears, as zeros."""

    def by_hand(self, loss, number):
        optimizer = self.optimizers()
        self.manual_backward(loss)
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        self.lr_schedulers().step()


@pytest.mark.parametrize(
    ("automatic", "make"),
    [(True, test_lightning.Module), (False, test_lightning.Module), (False, Zeroing)],
    ids=["automatic", "manual", "zeros"],
)
def test_a_loss_scaler_in_lightning(automatic, make):
    """The plugin of fp16, but for its autocast."""
    from lightning.pytorch.plugins import MixedPrecision

    class Scaled(MixedPrecision):
        def autocast_context_manager(self):
            return contextlib.nullcontext()

        def forward_context(self):
            return contextlib.nullcontext()

    module = make(automatic=automatic, hybrid=switch())
    spoil(module.model)
    rates = Rates(None)
    module.model.register_forward_pre_hook(
        lambda *_: rates.seen.append(module.optimizers().param_groups[0]["lr"])
    )
    own = scaler()
    trainer = test_lightning.fit(module, plugins=[Scaled("16-mixed", "cpu", own)])
    assert own.get_scale() == 2048.0  # doubled, halved, doubled
    assert_left_out(module.model, trainer.optimizers[0], rates.seen)


def test_kbfgs_in_manual_optimization():
    """`step(closure)` of Lightning's wrapper; the second evaluation is within it."""

    class Module(test_lightning.Module):
        def by_hand(self, loss, number):
            raise NotImplementedError

        def training_step(self, batch, number):
            optimizer = self.optimizers()

            def closure():
                optimizer.zero_grad()
                loss = self.model(**batch).loss
                self.manual_backward(loss)
                return loss

            optimizer.step(closure)
            self.lr_schedulers().step()

    module = Module(automatic=False, make=test_lightning.kbfgs)
    trainer = test_lightning.fit(module)
    automatic = test_lightning.Module(make=test_lightning.kbfgs)
    other = test_lightning.fit(automatic)
    assert isinstance(trainer.optimizers[0], mkor.KBFGS)
    assert_agree(module.model, trainer.optimizers[0], automatic.model, other.optimizers[0], 1e-6)
