"""Checkpoints of MKOR's rules and dtypes; `test_copies` has what every method owes."""

import copy
import io

import pytest
import torch

import mkor
from cases.common import (
    RULES,
    STATE_DTYPES,
    VECTORS,
    assert_same,
    batches,
    factors,
    mlp,
    train,
    wrap,
)

SPARSE_UPDATES = {"factor_update_steps": 4, "warmup_steps": 2}


def through_file(state):
    """A state dict as a strict reader gets it back from a file."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def adamw(model, **options):
    base = torch.optim.AdamW(model.parameters(), lr=0.02, weight_decay=0.1)
    return mkor.MKOR(model, base, **options)


@pytest.mark.parametrize("vectors", VECTORS)
@pytest.mark.parametrize("state_dtype", STATE_DTYPES)
@pytest.mark.parametrize("rule", RULES)
def test_a72_a_checkpoint_resumes_to_the_last_bit(rule, state_dtype, vectors):
    options = {"rule": rule, "state_dtype": state_dtype, "vectors": vectors, **SPARSE_UPDATES}
    data = batches(10, 6, 5, 3)

    def fresh():
        model = mlp(5, 4, 3)
        optimizer = adamw(model, **options)
        return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)

    def steps(model, optimizer, scheduler, part):
        for batch in part:
            train(model, optimizer, [batch])
            scheduler.step()

    straight = fresh()
    steps(*straight, data)
    first = fresh()
    steps(*first, data[:5])
    saved = through_file([part.state_dict() for part in first])
    second = fresh()
    for part, state in zip(second, saved, strict=True):
        part.load_state_dict(state)
    steps(*second, data[5:])
    assert_same(straight[0], second[0])
    assert_same(factors(straight[1]), factors(second[1]))
    assert straight[1].layers() == second[1].layers()
    assert second[1].layers()[0].last_update == 8 and second[1].layers()[0].updates == 4
    assert straight[2].get_last_lr() == second[2].get_last_lr() == [0.02 * 0.5**3]


def test_a73_loaded_state_follows_its_parameter():
    model = mlp(5, 4, 3)
    optimizer = wrap(model)
    train(model, optimizer, batches(3, 6, 5, 3))
    saved = copy.deepcopy(optimizer.state_dict())
    for layer in saved["preconditioner"]["layers"].values():
        layer["state"] = {
            key: tensor.double() if tensor.is_floating_point() else tensor
            for key, tensor in layer["state"].items()
        }
    other_model = copy.deepcopy(model)
    other = wrap(other_model)
    other.load_state_dict(saved)
    last = batches(5, 6, 5, 3)[4:]
    train(model, optimizer, last)
    train(other_model, other, last)
    assert {t.dtype for t in factors(other).values()} == {torch.float32}
    assert_same(model, other_model)
    assert_same(factors(optimizer), factors(other))


@pytest.mark.gpu
def test_a73_a_checkpoint_loaded_on_the_cpu_moves_to_the_device():
    model = mlp(5, 4, 3).cuda()
    optimizer = wrap(model)
    data = [(x.cuda(), y.cuda()) for x, y in batches(4, 6, 5, 3)]
    train(model, optimizer, data[:3])
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    optimizer.load_state_dict(torch.load(file, map_location="cpu", weights_only=True))
    train(model, optimizer, data[3:])
    assert {t.device.type for t in factors(optimizer).values()} == {"cuda"}
