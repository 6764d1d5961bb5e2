"""Snippets of the documentation run as they are printed."""

import copy
import math

import pytest
import torch
from torch import nn

import mkor
from test_docs import DOCS, blocks


def snippets(page, word):
    """The Python blocks of a page that hold a word, those in lists as well."""
    return [text for text in blocks(DOCS / page, "python") if word in text]


def snippet(page, word):
    """The only one that holds a word."""
    (text,) = snippets(page, word)
    return text


def run(text, **names):
    """Runs a snippet beside the names that its page takes for granted; all names in the end."""
    names = {"mkor": mkor, "torch": torch, **names}
    exec(text, names)
    return names


@pytest.mark.parametrize("text", snippets("use.md", "KneePointLR"))
def test_knee_points_alone_and_after_a_warm_up(text):
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    seen = []

    def train(model, optimizer):
        seen.append(optimizer.param_groups[0]["lr"])
        optimizer.step()

    run(
        text,
        epochs=60,
        train=train,
        validation_loss=lambda _: math.exp(-len(seen) / 5),
        model=model,
        optimizer=optimizer,
    )
    warm = "warm" in text
    assert seen[0] == pytest.approx(0.1 if warm else 1.0)
    assert seen[8] == pytest.approx(1.0)
    assert seen[-1] <= 0.5


def test_what_tensorboard_shows(tmp_path, monkeypatch):
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    monkeypatch.chdir(tmp_path)
    model = net()
    base = torch.optim.SGD(model.parameters(), lr=0.5)
    optimizer = mkor.MKOR(model, base, hybrid=mkor.HybridSwitch(at_step=2))
    names = run(snippet("use.md", "SummaryWriter"), optimizer=optimizer)
    for step in range(3):
        learn(model, optimizer, 1)
        names["show"](step, torch.tensor(0.1 * step))
    names["writer"].close()
    events = reader.EventAccumulator("events")
    events.Reload()
    seen = {tag: [e.step for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}
    assert seen["loss"] == seen["learning rate"] == [0, 1, 2]
    assert seen["norm/0/inputs"] == seen["resets/2"] == seen["skipped/0"] == [0]


@pytest.fixture
def one_worker(tmp_path):
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path / 'rendezvous'}", rank=0, world_size=1
    )
    yield
    torch.distributed.destroy_process_group()


def net():
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))


def learn(model, optimizer, steps=2):
    for _ in range(steps):
        model(torch.ones(3, 4)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def test_the_optimizer_of_a_wrapped_model(one_worker):
    names = run(
        snippet("workers.md", "model = DistributedDataParallel(model)"),
        DistributedDataParallel=nn.parallel.DistributedDataParallel,
        model=net(),
    )
    learn(names["model"], names["optimizer"])
    assert [info.updates for info in names["optimizer"].layers()] == [2, 2]


def test_a_checkpoint_by_torch_distributed(one_worker, tmp_path):
    text = snippet("workers.md", "dcp.save")
    save, load = text.split("dcp.load")
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint import state_dict as functions

    names = {name: getattr(functions, name) for name in functions.__all__}
    names |= {"dcp": dcp, "path": tmp_path / "checkpoint"}
    model = net()
    optimizer = mkor.MKOR(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    learn(model, optimizer)
    names = run(save, model=model, optimizer=optimizer, **names)
    then = [p.detach().clone() for p in model.parameters()], optimizer.state_dict()
    learn(model, optimizer)
    exec(f"dcp.load{load}", names)
    for now, saved in zip(model.parameters(), then[0], strict=True):
        assert torch.equal(now, saved)
    assert [info.updates for info in optimizer.layers()] == [2, 2]


def test_tensor_parallel_layers_under_fsdp(one_worker):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import parallel

    """One worker has a mesh of one, where layers still pass DTensors on."""
    model = nn.Sequential()
    model.layers = nn.Sequential(net())
    alone = copy.deepcopy(model)
    text = snippet("workers.md", "parallelize_module(model").replace(
        '"cuda", (4, 2)', '"cpu", (1, 1)'
    )
    names = run(
        text,
        model=model,
        plan={"layers.0.0": parallel.ColwiseParallel(), "layers.0.2": parallel.RowwiseParallel()},
        init_device_mesh=init_device_mesh,
        fully_shard=fully_shard,
        parallelize_module=parallel.parallelize_module,
    )
    learn(model, names["optimizer"])
    assert [info.updates for info in names["optimizer"].layers()] == [2, 2]
    learn(alone, mkor.auto(alone, lr=1e-3))
    for own, other in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(own.full_tensor(), other, rtol=1e-5, atol=1e-6)
