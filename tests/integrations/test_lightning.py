"""Lightning does what a plain loop does, by either kind of optimization, and resumes exactly."""

import logging

import pytest
import torch

import mkor
from integrations.common import (
    BATCH,
    adamw,
    assert_agree,
    batches,
    build,
    linear,
    plain_loop,
    sentences,
    tiny,
)

pytest.importorskip("transformers")
lightning = pytest.importorskip("lightning.pytorch")

from mkor.integrations.lightning import PreconditionerCallback  # noqa: E402

pytestmark = [
    # Lightning on how it runs here.
    pytest.mark.filterwarnings("ignore:The 'train_dataloader' does not have many workers"),
    pytest.mark.filterwarnings("ignore:The number of training batches"),
]


class Module(lightning.LightningModule):
    """The tiny model with its optimizer and schedule."""

    def __init__(self, steps=6, automatic=True, make=build, accumulate=1, clip=None, **options):
        super().__init__()
        self.automatic_optimization = automatic
        self.steps, self.make, self.options = steps, make, options
        self.every, self.clip = accumulate, clip
        self.model = tiny()

    def configure_optimizers(self):
        optimizer = self.make(self.model, **self.options)
        return [optimizer], [{"scheduler": linear(optimizer, self.steps), "interval": "step"}]

    def training_step(self, batch, number):
        loss = self.model(**batch).loss
        if not self.automatic_optimization:
            self.by_hand(loss, number)
        return loss

    def by_hand(self, loss, number):
        optimizer = self.optimizers()
        self.manual_backward(loss / self.every)
        if (number + 1) % self.every == 0:
            if self.clip is not None:
                self.clip_gradients(optimizer, self.clip, "norm")
            optimizer.step()
            optimizer.zero_grad()
            self.lr_schedulers().step()


def fit(module, folder=None, count=6, resume=None, callbacks=None, **options):
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    trainer = lightning.Trainer(
        accelerator="cpu",
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
        callbacks=[PreconditionerCallback()] if callbacks is None else callbacks,
        **{"max_epochs": 1, "logger": False, **options},
    )
    loader = torch.utils.data.DataLoader(sentences(BATCH * count), batch_size=BATCH)
    trainer.fit(module, loader, ckpt_path=resume, weights_only=True if resume else None)
    return trainer


FEATURES = {
    "schedule": ({}, {}),
    "clipping": ({"gradient_clip_val": 0.05}, {"clip": 0.05}),
    "accumulation": (
        {"accumulate_grad_batches": 2, "gradient_clip_val": 0.05},
        {"accumulate": 2, "clip": 0.05},
    ),
    "autocast": ({"precision": "bf16-mixed"}, {"autocast": True}),
}


@pytest.mark.parametrize("automatic", [True, False], ids=["automatic", "manual"])
@pytest.mark.parametrize("feature", FEATURES)
def test_lightning_does_what_a_loop_does(feature, automatic):
    options, same = FEATURES[feature]
    steps = 6 // same.get("accumulate", 1)
    own = {key: value for key, value in same.items() if key != "autocast"}
    if not automatic:  # the module does it by itself
        options = {key: value for key, value in options.items() if key == "precision"}
    module = Module(steps, automatic, **own)
    trainer = fit(module, **options)
    other = tiny()
    reference = build(other)
    plain_loop(other, reference, batches(6), **same)
    assert_agree(module.model, trainer.optimizers[0], other, reference, 1e-6)


def test_padding_counts_without_a_mask():
    module = Module()
    trainer = fit(module, callbacks=[PreconditionerCallback(mask=None)])
    other = tiny()
    reference = build(other)
    plain_loop(other, reference, batches(6), masks=False)
    assert_agree(module.model, trainer.optimizers[0], other, reference, 1e-6)


@pytest.mark.parametrize("automatic", [True, False], ids=["automatic", "manual"])
def test_resuming_is_exact(tmp_path, automatic):
    whole = Module(automatic=automatic)
    trainer = fit(whole, tmp_path, count=3, max_epochs=2)
    half = fit(Module(automatic=automatic), tmp_path, count=3)
    half.save_checkpoint(tmp_path / "half.ckpt")
    rest = Module(automatic=automatic)
    resumed = fit(rest, tmp_path, count=3, max_epochs=2, resume=tmp_path / "half.ckpt")
    assert resumed.global_step == trainer.global_step == 6
    assert_agree(whole.model, trainer.optimizers[0], rest.model, resumed.optimizers[0])


@pytest.mark.parametrize("automatic", [True, False], ids=["automatic", "manual"])
def test_it_hands_over(automatic):
    switch = mkor.HybridSwitch(window=2, warmup=2, patience=1, threshold=0.99, smoothing=0.1)
    trainer = fit(Module(16, automatic, hybrid=switch), count=16)
    assert not any(info.preconditioned for info in trainer.optimizers[0].layers())


@pytest.mark.parametrize("automatic", [True, False], ids=["automatic", "manual"])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_the_switch_sees_each_loss_once(accumulate, automatic):
    """As it is back-propagated: automatic optimization divides it itself, a module by hand."""
    switch = mkor.HybridSwitch(window=100)
    module = Module(6 // accumulate, automatic, accumulate=accumulate, hybrid=switch)
    own = {"accumulate_grad_batches": accumulate} if automatic else {}
    optimizer = fit(module, **own).optimizers[0]
    other = tiny()
    losses = plain_loop(other, build(other), batches(6), accumulate=accumulate)
    expected = {
        "total": sum(losses) / (1 if automatic else accumulate),
        "finite": 6,
        "calls": 6,
    }
    assert optimizer._handover.state_dict()["meter"] == pytest.approx(expected, rel=1e-6)


def kbfgs(model, **options):
    return mkor.KBFGS(model, adamw(model.parameters()), warmup_steps=2, **options)


def test_automatic_optimization_evaluates_again_for_kbfgs():
    module = Module(make=kbfgs)
    trainer = fit(module)
    other = tiny()
    reference = kbfgs(other)
    scheduler = linear(reference, 6)
    for batch in batches(6):
        reference.set_mask(batch["attention_mask"])

        def closure(batch=batch):
            reference.zero_grad()
            loss = other(**batch).loss
            loss.backward()
            return loss

        reference.step(closure)
        scheduler.step()
    assert_agree(module.model, trainer.optimizers[0], other, reference, 1e-6)


def test_the_switch_sees_the_first_evaluation_of_kbfgs():
    shown, alone = (
        fit(Module(make=kbfgs, hybrid=mkor.HybridSwitch(window=100)), callbacks=callbacks)
        for callbacks in ([PreconditionerCallback(mask=None)], [])
    )
    seen, expected = (one.optimizers[0]._handover.state_dict()["meter"] for one in (shown, alone))
    assert seen == expected and seen["calls"] == 6


class Log(lightning.loggers.Logger):
    """Keeps what is logged."""

    name, version = "log", 0

    def __init__(self):
        super().__init__()
        self.lines = []

    def log_metrics(self, metrics, step=None):
        self.lines.append((step, metrics))

    def log_hyperparams(self, *_, **__):
        pass


def test_counters_are_logged():
    log = Log()
    fit(Module(), logger=log, log_every_n_steps=3)
    shown = [(step, line) for step, line in log.lines if "mkor/updates" in line]
    assert [(step, line["mkor/updates"]) for step, line in shown] == [(3, 3), (6, 4)]
    assert all(line["mkor/skipped"] == line["mkor/resets"] == 0 for _, line in shown)


def test_a_trainer_whose_optimizers_do_not_precondition():
    module = Module(make=lambda model: adamw(model.parameters()))
    with pytest.raises(TypeError, match=r"of the optimizers preconditions \(AdamW\): let conf"):
        fit(module)


def test_a_knee_scheduler_follows_what_is_logged():
    class Watched(Module):
        def configure_optimizers(self):
            optimizer = self.make(self.model)
            scheduler = mkor.KneePointLR(optimizer, dwell=2)
            how = {"monitor": "loss", "reduce_on_plateau": True, "interval": "step"}
            return [optimizer], [{"scheduler": scheduler, **how}]

        def training_step(self, batch, number):
            loss = super().training_step(batch, number)
            self.log("loss", loss)
            return loss

    trainer = fit(Watched(), count=8)
    scheduler = trainer.lr_scheduler_configs[0].scheduler
    other = tiny()
    reference = build(other)
    alone = mkor.KneePointLR(reference, dwell=2)
    for batch in batches(8):
        reference.set_mask(batch["attention_mask"])
        loss = other(**batch).loss
        loss.backward()
        reference.step()
        alone.step(loss.detach())
        reference.zero_grad()
    assert scheduler.last_epoch == 8 and scheduler.knees == alone.knees > 0
    assert scheduler.last == pytest.approx(alone.last, rel=1e-6)
    assert scheduler.get_last_lr() == alone.get_last_lr()


def test_a_mask_that_the_batch_lacks():
    with pytest.raises(TypeError, match=r"mask must be the name of the mask .* got int"):
        PreconditionerCallback(mask=1)
    with pytest.raises(ValueError, match=r"no mask 'mask' in the batch, which has input_ids, a"):
        fit(Module(), callbacks=[PreconditionerCallback(mask="mask")])


def test_batches_may_have_no_mask_unless_it_was_named():
    class Pair(Module):
        def training_step(self, batch, number):
            inputs, labels = batch
            return self.model(input_ids=inputs, labels=labels).loss

    rows = [(row["input_ids"], row["labels"]) for row in sentences(8)]
    loader = torch.utils.data.DataLoader(rows, batch_size=BATCH)
    for mask, error in ((None, None), ("attention_mask", None), ("mask", "which has no names")):
        trainer = lightning.Trainer(
            accelerator="cpu",
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            max_epochs=1,
            callbacks=[PreconditionerCallback(mask=mask)],
        )
        if error is None:
            trainer.fit(Pair(), loader)
            assert trainer.global_step == 2
        else:
            with pytest.raises(ValueError, match=error):
                trainer.fit(Pair(), loader)
