"""Hugging Face's Trainer does what a plain loop does, and resumes to the last bit."""

import pytest
import torch

import mkor
from integrations.common import (
    BATCH,
    adamw,
    assert_agree,
    batches,
    build,
    plain_loop,
    sentences,
    tiny,
)

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from mkor.integrations.huggingface import (  # noqa: E402
    PreconditionerCallback,
    decay_groups,
    optimizer_factory,
)


def trainer(folder, model, optimizer, *, steps=6, callbacks=None, **options):
    args = transformers.TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=BATCH,
        max_steps=steps,
        train_sampling_strategy="sequential",
        lr_scheduler_type="linear",
        logging_steps=1,
        **{"max_grad_norm": 0.0, "save_strategy": "no", **options},
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )
    accumulate = options.get("gradient_accumulation_steps", 1)
    passed = (
        {"optimizers": (optimizer, None)}
        if isinstance(optimizer, mkor.Preconditioner)
        else {"optimizer_cls_and_kwargs": optimizer}
    )
    return transformers.Trainer(
        model=model,
        args=args,
        train_dataset=sentences(BATCH * steps * accumulate),
        callbacks=[PreconditionerCallback()] if callbacks is None else callbacks,
        **passed,
    )


FEATURES = {
    "schedule": ({}, {}),
    "clipping": ({"max_grad_norm": 0.05}, {"clip": 0.05}),
    # The Trainer adds up the losses of micro-batches of a classification, without dividing them.
    "accumulation": ({"gradient_accumulation_steps": 2}, {"accumulate": 2, "divide": 1}),
    "autocast": ({"bf16": True}, {"autocast": True}),
    "activation checkpointing": (
        {
            "activation_checkpointing": True,
            "activation_checkpointing_kwargs": {"use_reentrant": False},
        },
        {},
    ),
}


@pytest.mark.parametrize("feature", FEATURES)
def test_the_trainer_does_what_a_loop_does(feature, tmp_path):
    options, same = FEATURES[feature]
    model, other = tiny(), tiny()
    optimizer, reference = build(model), build(other)
    trained = trainer(tmp_path, model, optimizer, **options)
    trained.train()
    losses = plain_loop(other, reference, batches(6 * same.get("accumulate", 1)), **same)
    assert_agree(model, optimizer, other, reference, 1e-6)
    assert len(set(losses)) == len(losses)


def test_padding_counts_without_the_callback(tmp_path):
    model, other = tiny(), tiny()
    optimizer, reference = build(model), build(other)
    trainer(tmp_path, model, optimizer, callbacks=[]).train()
    plain_loop(other, reference, batches(6), masks=False)
    assert_agree(model, optimizer, other, reference, 1e-6)
    with pytest.raises(AssertionError):
        other = tiny()
        reference = build(other)
        plain_loop(other, reference, batches(6))
        assert_agree(model, optimizer, other, reference, 1e-6)


FACTORIES = {
    "mean": lambda: optimizer_factory(mkor.MKOR, adamw, factor_update_steps=3),
    "sketch": lambda: optimizer_factory(
        mkor.MKOR, adamw, factor_update_steps=3, statistic="sketch", vectors=3
    ),
    "auto": lambda: optimizer_factory(mkor.auto, lr=0.01, vectors=3, rank=4),
}


@pytest.mark.parametrize("optimizer", FACTORIES.values(), ids=FACTORIES)
def test_resuming_is_exact(tmp_path, optimizer):

    whole = trainer(tmp_path, tiny(), optimizer(), save_strategy="steps", save_steps=4)
    whole.train()
    rest = trainer(tmp_path, tiny(), optimizer(), save_strategy="steps", save_steps=4)
    rest.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    assert rest.state.global_step == 6
    ours, theirs = (t.optimizer.optimizer for t in (whole, rest))
    assert_agree(whole.model, ours, rest.model, theirs)
    losses = [
        [line["loss"] for line in t.state.log_history if "loss" in line] for t in (whole, rest)
    ]
    assert losses[0] == losses[1] and len(losses[0]) == 6


def test_a_model_that_is_built_late(tmp_path):
    late = transformers.Trainer(
        model_init=tiny,
        args=trainer(tmp_path, tiny(), optimizer_factory(mkor.Eva, adamw)).args,
        train_dataset=sentences(24),
        optimizer_cls_and_kwargs=optimizer_factory(mkor.Eva, adamw, weight_decay=0.1),
    )
    late.train()
    own = late.optimizer.optimizer
    assert isinstance(own, mkor.Eva)
    assert {info.updates for info in own.layers() if info.preconditioned} == {6}


@pytest.mark.parametrize(("given", "decay"), [({}, 0.01), ({"weight_decay": 0.2}, 0.2)])
def test_the_factory_of_auto_needs_no_base(given, decay):
    make, arguments = optimizer_factory(mkor.auto, lr=0.02, **given)
    optimizer = make(**arguments)(tiny())
    assert isinstance(optimizer, mkor.Preconditioner)
    assert optimizer.param_groups[0]["lr"] == 0.02
    assert {group["weight_decay"] for group in optimizer.param_groups} == {decay, 0.0}


def test_groups_of_weight_decay_hold_what_trains():
    model = tiny()
    model.bert.embeddings.requires_grad_(False)
    matrices, vectors = decay_groups(model, 0.1)
    assert (matrices["weight_decay"], vectors["weight_decay"]) == (0.1, 0.0)
    assert all(p.dim() > 1 for p in matrices["params"])
    assert all(p.dim() == 1 for p in vectors["params"])
    held = {id(p) for group in (matrices, vectors) for p in group["params"]}
    assert held == {id(p) for p in model.parameters() if p.requires_grad}
    assert len(decay_groups(torch.nn.Linear(2, 2, bias=False), 0.0)) == 1


def test_the_callback_logs_counters_and_hands_over(tmp_path):
    model = tiny()
    switch = mkor.HybridSwitch(window=2, warmup=2, patience=1, threshold=0.99, smoothing=0.1)
    optimizer = build(model, hybrid=switch)
    trained = trainer(tmp_path, model, optimizer, steps=16)
    trained.train()
    lines = [line for line in trained.state.log_history if "loss" in line]
    assert lines[0]["mkor/updates"] == 1 and lines[0]["mkor/layers"] > 10
    assert lines[-1]["mkor/layers"] == 0
    assert not any(info.preconditioned for info in optimizer.layers())


def test_adapters_of_peft(tmp_path):
    peft = pytest.importorskip("peft")

    def adapted():
        torch.manual_seed(1)
        return peft.get_peft_model(tiny(), peft.LoraConfig(r=2, target_modules=["query", "value"]))

    model, other = adapted(), adapted()
    optimizer, reference = build(model), build(other)
    trainer(tmp_path, model, optimizer, remove_unused_columns=False).train()
    plain_loop(other, reference, batches(6))
    assert_agree(model, optimizer, other, reference, 1e-6)


def knee(optimizer):
    return mkor.KneePointLR(optimizer, dwell=2, window=2, beta=0.9)


def warmed(optimizer):
    after = knee(optimizer)
    warm = torch.optim.lr_scheduler.LinearLR(optimizer, 0.5, total_iters=2)
    return torch.optim.lr_scheduler.SequentialLR(optimizer, [warm, after], [2])


@pytest.mark.parametrize("make", [knee, warmed])
def test_the_callback_shows_a_knee_scheduler_the_loss(tmp_path, make):
    """Of the last micro-batch, as in a loop; and it resumes with the rest."""

    def trained(folder, resume=None):
        model = tiny()
        optimizer = build(model)
        own = trainer(
            folder, model, optimizer, steps=12, save_strategy="steps", save_steps=5,
            gradient_accumulation_steps=2,
        )  # fmt: skip
        own.lr_scheduler = make(optimizer)
        own.train(resume_from_checkpoint=resume)
        return model, optimizer

    model, optimizer = trained(tmp_path)
    other = tiny()
    reference = build(other)
    alone = make(reference)
    for number, batch in enumerate(batches(24)):
        reference.set_mask(batch["attention_mask"])
        loss = other(**batch).loss
        loss.backward()
        if number % 2:
            reference.step()
            inner = alone if make is knee else alone._schedulers[1]
            inner.observe(loss)
            alone.step()
            reference.zero_grad()
    assert_agree(model, optimizer, other, reference, 1e-6)
    assert optimizer.param_groups[0]["lr"] == reference.param_groups[0]["lr"] < 0.01
    resumed = trained(tmp_path, str(tmp_path / "checkpoint-5"))
    assert_agree(model, optimizer, *resumed)
    assert optimizer.param_groups[0]["lr"] == resumed[1].param_groups[0]["lr"]


def test_the_callback_leaves_no_hook(tmp_path):
    model = tiny()
    trained = trainer(tmp_path, model, build(model), steps=2)
    trained.train()
    trained.train()
    assert not model._forward_pre_hooks and not model._forward_hooks


def test_masks_of_other_kinds_are_ignored(tmp_path):
    model = tiny()
    callback = PreconditionerCallback(mask=None)
    trainer(tmp_path, model, optimizer := build(model), callbacks=[callback]).train()
    other = tiny()
    reference = build(other)
    plain_loop(other, reference, batches(6), masks=False)
    assert_agree(model, optimizer, other, reference, 1e-6)


def test_a_trainer_whose_optimizer_does_not_precondition(tmp_path):
    model = tiny()
    plain = trainer(tmp_path, model, (torch.optim.SGD, {"lr": 0.1}))
    with pytest.raises(TypeError, match="Trainer's optimizer is SGD, which preconditions nothing"):
        plain.train()


def built():
    model = tiny()
    return mkor.MKOR(model, adamw(model.parameters()))


FACTORY_ERRORS = {
    "a built one": (
        lambda: optimizer_factory(built()),
        r"is built already \(MKOR\): pass its class",
    ),
    "a plain one": (
        lambda: optimizer_factory(torch.optim.AdamW, adamw),
        r"must be a class such as mkor.MKOR, or mkor.auto, got AdamW; other optimizers need no",
    ),
    "a name": (lambda: optimizer_factory("mkor"), "must be a class such as mkor.MKOR, .* got str"),
    "no base": (lambda: optimizer_factory(mkor.MKOR), "MKOR can't be called so: missing .*'base'"),
    "a built base": (
        lambda: optimizer_factory(mkor.MKOR, built().base),
        "base must be a function that makes an optimizer of parameter groups, .* got AdamW",
    ),
    "a base of auto": (
        lambda: optimizer_factory(mkor.auto, adamw),
        "auto has no base optimizer: leave out `base`, and pass lr=",
    ),
    "a rate": (lambda: optimizer_factory(mkor.MKOR, adamw, lr=1), "unexpected keyword .*'lr'"),
    "a typo": (lambda: optimizer_factory(mkor.auto, lr=1, powr=1), "unexpected keyword .*'powr'"),
}


@pytest.mark.parametrize(("call", "text"), FACTORY_ERRORS.values(), ids=FACTORY_ERRORS)
def test_a_factory_of_what_makes_no_optimizer(call, text):
    with pytest.raises(TypeError, match=text):
        call()


def test_a_mask_that_the_model_is_not_given(tmp_path):
    with pytest.raises(TypeError, match=r"mask must be the name of the mask .* got Tensor"):
        PreconditionerCallback(mask=torch.ones(2))
    model = tiny()
    own = trainer(tmp_path, model, build(model), callbacks=[PreconditionerCallback(mask="mask")])
    with pytest.raises(ValueError, match=r"no mask 'mask' in the batch, which has .*ention_mask"):
        own.train()


def test_kbfgs_needs_a_closure_that_the_trainer_lacks(tmp_path):
    model = tiny()
    own = mkor.KBFGS(model, adamw(model.parameters()))
    with pytest.raises(TypeError, match=r"KBFGS evaluates the model itself: call step\(closure\)"):
        trainer(tmp_path, model, own).train()
