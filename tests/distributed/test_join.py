"""Uneven inputs under torch's Join (case A85): right statistics, no hang, equal workers."""

import copy

import pytest
import torch
from torch.distributed.algorithms.join import Join
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import mkor
from gloo import spawn
from small_workers import batch, build, net

THIN = {"representation": "lowrank", "rank": 3}
JOBS = {
    "dense": {},
    "low rank": THIN,
    "low rank, momentum": {**THIN, "momentum": 0.9, "rescale": "rms"},
    "sketch": {**THIN, "statistic": "sketch", "vectors": 2, "agreement_steps": 1},
    "Eva": {"method": "Eva", "kl_clip": 1e-3},
    "K-FAC": {"method": "KFAC"},
    "SNGD": {"method": "SNGD"},
    "HyLo": {"method": "HyLo", "rank": 0.5, "switch_steps": 2},
    "hybrid": {"hybrid": mkor.HybridSwitch(window=2, patience=1)},
}
UNION = ("dense", "low rank", "low rank, momentum", "Eva")
BATCHES = (3, 5)
"""Of each worker, in turn the first and the second to have none."""


def one_step(model, optimizer, *rows):
    """A step on the batches, of as many workers as there are; half of the loss is each one's."""

    def closure():
        optimizer.zero_grad()
        loss = sum(model(own).square().mean() for own in rows)
        loss.backward()
        return loss

    return optimizer.step(closure)


def everything(optimizer):
    """Parameters, factors and what the base keeps, by name."""
    state = copy.deepcopy(optimizer.state_dict())
    out = {f"base {k} {key}": t for k, s in state["state"].items() for key, t in s.items()}
    for name, layer in state["preconditioner"]["layers"].items():
        for part in ("state", "momentum"):
            out |= {f"{name} {part} {key}": t for key, t in layer[part].items()}
    out |= {n.removeprefix("module."): p for n, p in optimizer.model.named_parameters()}
    out["step"] = torch.tensor(state["preconditioner"]["step"])
    return {name: tensor.detach().clone() for name, tensor in out.items()}


def uneven(rank):
    out = {}
    for name, options in JOBS.items():
        model = DistributedDataParallel(net())
        optimizer = build(model, **copy.deepcopy(options))
        step = 0
        for turn in range(2):
            with Join([model, optimizer]):
                for _ in range(BATCHES[rank - turn]):
                    one_step(model, optimizer, batch(rank, step, 6))
                    step += 1
            step = 5 * (turn + 1)
        one_step(model, optimizer, batch(rank, step, 6))
        out[name] = everything(optimizer)
    out["none at all"] = none_at_all(rank)
    out["refused"] = refused(rank)
    return out


def none_at_all(rank):
    """A worker that has no batch from the start."""
    model = DistributedDataParallel(net())
    optimizer = build(model, **THIN)
    with Join([model, optimizer]):
        for step in range(3 * rank):
            one_step(model, optimizer, batch(rank, step, 6))
    return everything(optimizer)


def message(kind, function):
    with pytest.raises(kind) as caught:
        function()
    return str(caught.value)


def refused(rank):
    """What is told of what can't be shadowed, while all workers still have batches."""
    model = DistributedDataParallel(net())
    optimizer = build(model)
    out = {"first": message(ValueError, lambda: Join([optimizer, model]))}
    for options in ({"method": "KBFGS"}, {"grad_worker_fraction": 0.5}):
        other = build(model, **options)
        out[str(options)] = message(ValueError, lambda: Join([model, other]))  # noqa: B023
        other.close()
    lbfgs = mkor.MKOR(model, torch.optim.LBFGS(model.parameters()))
    out["lbfgs"] = message(ValueError, lambda: Join([model, lbfgs]))
    lbfgs.close()
    sharded = fully_shard(net())
    out["sharded"] = message(ValueError, build(sharded).join_hook)

    def twice():
        with Join([model, optimizer]):
            model(batch(rank, 0, 6)).sum().backward()
            model(batch(rank, 1, 6)).sum().backward()

    out["twice"] = message(RuntimeError, twice)
    return out


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    return spawn(uneven, tmp_path_factory.mktemp("join"), timeout=110)


def test_a85_workers_are_equal_after_uneven_inputs(outcomes):
    for name in (*JOBS, "none at all"):
        first, second = (outcome[name] for outcome in outcomes)
        assert first.keys() == second.keys()
        assert [key for key in first if not torch.equal(first[key], second[key])] == [], name
        assert int(first["step"]) == (3 if name == "none at all" else 11), name
        assert all(bool(tensor.isfinite().all()) for tensor in first.values()), name


def test_a85_statistics_are_those_of_the_batches_that_there_are(outcomes):
    for name in UNION:
        model = net()
        optimizer = build(model, **JOBS[name])
        for step in range(11):
            longer = 1 if step < 5 else 0
            workers = (0, 1) if step % 5 < 3 else (longer,)

            def closure(step=step, workers=workers, model=model, optimizer=optimizer):
                optimizer.zero_grad()
                loss = sum(model(batch(w, step, 6)).square().mean() for w in workers) / 2
                loss.backward()
                return loss

            optimizer.step(closure)
        for key, parameter in model.named_parameters():
            torch.testing.assert_close(
                outcomes[0][name][key], parameter.detach(), rtol=1e-6, atol=1e-9
            )


def test_what_cannot_be_shadowed(outcomes):
    said = outcomes[0]["refused"]
    assert said == outcomes[1]["refused"]
    assert "enter them as Join([model, optimizer])" in said["first"]
    assert "where this method evaluates each batch twice" in said["{'method': 'KBFGS'}"]
    assert "(grad_worker_fraction is below 1)" in said["{'grad_worker_fraction': 0.5}"]
    assert "where its base evaluates the model several times a step" in said["lbfgs"]
    assert "where parameters are sharded: give all workers as many" in said["sharded"]
    assert "a second forward pass in a step under torch's Join" in said["twice"]
