"""Accelerate does what a plain loop does, and resumes to the last bit."""

import contextlib

import pytest
import torch

import mkor
from integrations.common import (
    adamw,
    assert_agree,
    batches,
    build,
    linear,
    plain_loop,
    tiny,
)

pytest.importorskip("transformers")
accelerate = pytest.importorskip("accelerate")


@pytest.fixture(autouse=True)
def fresh_state():
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    accelerate.state.GradientState._reset_state()
    yield
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    accelerate.state.GradientState._reset_state()


def prepared(model, optimizer, steps, **options):
    accelerator = accelerate.Accelerator(cpu=True, **options)
    scheduler = linear(optimizer, steps)
    return accelerator, *accelerator.prepare(model, optimizer, scheduler)


def loop(accelerator, model, optimizer, scheduler, data, clip=None):
    """Steps by the book of Accelerate; the mask goes to the optimizer inside."""
    for batch in data:
        with accelerator.accumulate(model):
            optimizer.optimizer.set_mask(batch["attention_mask"])
            loss = model(**batch).loss
            optimizer.optimizer.observe_loss(loss.detach())
            accelerator.backward(loss)
            if clip is not None and accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()


FEATURES = {
    "schedule": ({}, None, {}),
    "clipping": ({}, 0.05, {"clip": 0.05}),
    "accumulation": ({"gradient_accumulation_steps": 2}, 0.05, {"clip": 0.05, "accumulate": 2}),
    "autocast": ({"mixed_precision": "bf16"}, None, {"autocast": True}),
}


@pytest.mark.parametrize("feature", FEATURES)
def test_accelerate_does_what_a_loop_does(feature):
    options, clip, same = FEATURES[feature]
    model, other = tiny(), tiny()
    optimizer, reference = build(model), build(other)
    data = batches(6)
    steps = len(data) // same.get("accumulate", 1)
    accelerator, fast, wrapped, scheduler = prepared(model, optimizer, steps, **options)
    assert wrapped.optimizer is optimizer
    loop(accelerator, fast, wrapped, scheduler, data, clip)
    plain_loop(other, reference, data, **same)
    if "mixed_precision" in options:  # it wraps the forward of the model in autocast for good
        accelerator.unwrap_model(fast, keep_fp32_wrapper=False)
    assert_agree(model, optimizer, other, reference, 1e-6)


def test_a_loss_scaler_skips_a_step_without_a_trace():
    """AcceleratedOptimizer with a scaler, on the CPU: what fp16 is made of."""
    accelerate.Accelerator(cpu=True)
    model, other = tiny(), tiny()
    switch = mkor.HybridSwitch(window=100)
    optimizer, reference = build(model, hybrid=switch), build(other, hybrid=switch)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    wrapped = accelerate.optimizer.AcceleratedOptimizer(optimizer, scaler=scaler)
    data = batches(5)
    for number, batch in enumerate(data):
        optimizer.set_mask(batch["attention_mask"])
        loss = model(**batch).loss
        optimizer.observe_loss(loss)
        scaler.scale(loss * torch.inf if number == 2 else loss).backward()
        wrapped.step()
        assert wrapped.step_was_skipped == (number == 2)
        wrapped.zero_grad()
    for number, batch in enumerate(data):
        if number == 2:
            continue
        reference.set_mask(batch["attention_mask"])
        loss = other(**batch).loss
        loss.backward()
        reference.observe_loss(loss)
        reference.step()
        reference.zero_grad()
    assert_agree(model, optimizer, other, reference, 1e-5)
    seen, expected = (o._handover.state_dict()["meter"] for o in (optimizer, reference))
    assert seen == pytest.approx(expected, rel=1e-5) and seen["calls"] == 4


def test_resuming_is_exact(tmp_path):
    data = batches(6)

    def start():
        accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
        model = tiny()
        return prepared(model, build(model), 6)

    whole = start()
    loop(*whole, data[:3])
    whole[0].save_state(str(tmp_path))
    loop(*whole, data[3:])
    rest = start()
    rest[0].load_state(str(tmp_path))
    loop(*rest, data[3:])
    assert_agree(whole[1], whole[2].optimizer, rest[1], rest[2].optimizer)
    assert whole[3].get_last_lr() == rest[3].get_last_lr()


def test_it_hands_over():
    model = tiny()
    switch = mkor.HybridSwitch(window=2, warmup=2, patience=1, threshold=0.99, smoothing=0.1)
    optimizer = build(model, hybrid=switch)
    loop(*prepared(model, optimizer, 16), batches(16))
    assert not any(info.preconditioned for info in optimizer.layers())


def test_a_method_that_takes_a_closure():
    """K-BFGS, whose closure clears, back-propagates by the accelerator and returns the loss."""

    def run(accelerated):
        model = tiny()
        optimizer = mkor.KBFGS(model, adamw(model.parameters()), warmup_steps=2)
        step, backward = optimizer, torch.Tensor.backward
        if accelerated:
            accelerator, fast, step, _ = prepared(model, optimizer, 3)
            backward = accelerator.backward
            assert fast is model

        for batch in batches(3):

            def closure(batch=batch):
                step.zero_grad()
                loss = model(**batch).loss
                backward(loss)
                return loss

            with contextlib.suppress(KeyError):
                step.step(closure)
        return model, optimizer

    assert_agree(*run(True), *run(False))


def test_a_knee_scheduler_is_stepped_with_the_loss():
    lasts = []
    for prepare in (True, False):
        model = tiny()
        optimizer = build(model)
        scheduler = mkor.KneePointLR(optimizer, dwell=2)
        stepped = optimizer, scheduler
        if prepare:
            accelerator = accelerate.Accelerator(cpu=True)
            model, *stepped = accelerator.prepare(model, *stepped)
        for batch in batches(8):
            loss = model(**batch).loss
            loss.backward()
            stepped[0].step()
            stepped[1].step(loss.detach())
            stepped[0].zero_grad()
        assert scheduler.last_epoch == 8 and scheduler.knees > 0
        lasts.append((scheduler.last, scheduler.get_last_lr()))
    assert lasts[0] == lasts[1]
