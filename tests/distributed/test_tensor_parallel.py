"""Tensor parallelism: training on split linear layers is training on whole ones."""

import warnings

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

from distributed.test_dcp import load, state_of
from distributed.test_fsdp import METHODS, quietly, same_everywhere, states
from gloo import spawn
from sharded_runs import STEPS, closure_of, farthest, optimizer_for, parameters, share_of

SHARED = {
    name: METHODS[name]
    for name in (
        *(
            "dense",
            "dense, three vectors",
            "dense, raw",
            "dense, momentum",
            "window",
            "low rank",
            "low rank, clipped",
        ),
        *(
            "dense and a window",
            "low rank, momentum",
            "low rank, sketch",
            "window, sketch",
            "auto",
            "Eva",
        ),
    )
}
SHARED["Eva, clipped"] = {"method": "Eva", "kl_clip": 1e-3, "agreement_steps": 2}
BY_BATCH = ("low rank, sketch", "window, sketch", "auto")
"""Their signs depend on which batch a worker has: on several they are compared with DDP."""


class Net(nn.Module):
    """Two feed-forward blocks, with and without biases, between layers that stay whole."""

    def __init__(self):
        super().__init__()
        self.mix = nn.Conv1d(2, 3, 3, padding=1)
        self.start = nn.Linear(3, 6)
        self.norm = nn.LayerNorm(6)
        self.up = nn.Linear(6, 8)
        self.down = nn.Linear(8, 6)
        self.free_up = nn.Linear(6, 10, bias=False)
        self.free_down = nn.Linear(10, 6, bias=False)
        self.free = nn.Linear(6, 4, bias=False)
        self.head = nn.Linear(4, 2)

    def forward(self, rows):
        hidden = self.start(self.mix(rows).mT)
        hidden = self.norm(hidden)
        hidden = hidden + self.down(self.up(hidden).tanh())
        hidden = hidden + self.free_down(self.free_up(hidden).tanh())
        return self.head(self.free(hidden).tanh()).mean(dim=1)


PLANS = {
    "whole rows": {
        "up": ColwiseParallel(),
        "down": RowwiseParallel(),
        "free_up": ColwiseParallel(use_local_output=False),
        "free_down": RowwiseParallel(),
        "free": ColwiseParallel(output_layouts=Replicate()),
    },
    "rows divided between layers": {
        "start": ColwiseParallel(output_layouts=Shard(1)),
        "norm": SequenceParallel(use_local_output=True),
        "up": ColwiseParallel(input_layouts=Shard(1)),
        "down": RowwiseParallel(output_layouts=Shard(1)),
        "free_up": ColwiseParallel(input_layouts=Shard(1)),
        "free_down": RowwiseParallel(output_layouts=Shard(1)),
        "free": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    },
}


def new_model(dtype=torch.float64):
    torch.manual_seed(3)
    return Net().to(dtype)


def batches():
    source = torch.Generator().manual_seed(7)
    for _ in range(STEPS):
        rows = torch.randn(12, 2, 4, dtype=torch.float64, generator=source)
        yield rows, torch.randn(12, 2, dtype=torch.float64, generator=source)


def train(model, optimizer, share=slice(None), micro=1, data=None):
    for rows, goal in data or batches():
        parts = list(zip(rows[share].chunk(micro), goal[share].chunk(micro), strict=True))
        optimizer.step(closure_of(model, optimizer, parts))
    return parameters(model)


def on_one_mesh(rank, folder):
    """Everything on two workers, with whole and with split layers."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    out = {"refused": refused(mesh), "resumed": resumed(mesh, folder)}
    for plan, name in JOBS:
        model = parallelize_module(new_model(), mesh, dict(PLANS[plan]))
        optimizer = optimizer_for(model, **SHARED[name])
        out[plan, name] = train(model, optimizer, micro=2), states(optimizer)
    for name in BY_BATCH:
        model = DistributedDataParallel(new_model())
        out[name] = train(model, optimizer_for(model, **SHARED[name]), share_of(rank, 2))
    return out


SEQUENCE = ("dense", "dense, three vectors", "low rank", "low rank, sketch", "auto", "Eva, clipped")
JOBS = [
    *(("whole rows", name) for name in SHARED),
    *(("rows divided between layers", name) for name in SEQUENCE),
]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    folder = tmp_path_factory.mktemp("mesh")
    found = spawn(on_one_mesh, folder, str(folder))
    return [outcome | {"folder": str(folder)} for outcome in found]


def test_split_layers_are_trained_as_whole_ones(outcomes):
    """Columns and rows of weights, and layers that both workers have; micro-batches."""
    for plan, name in JOBS:
        trained = same_everywhere([outcome[plan, name][0] for outcome in outcomes])
        same_everywhere([outcome[plan, name][1] for outcome in outcomes])
        model = new_model()
        off, worst = farthest(trained, train(model, optimizer_for(model, **SHARED[name]), micro=2))
        assert off < 1e-6, (plan, name, worst)


FIRST, LAST = list(batches())[:3], list(batches())[3:]


def resumed(mesh, folder):
    """Parameters of a run that was saved half-way, and of one that loaded it."""
    warnings.simplefilter("ignore")  # torch's own, of its serialisation
    out = []
    for loads in (False, True):
        model = parallelize_module(new_model(), mesh, dict(PLANS["whole rows"]))
        optimizer = optimizer_for(model, **SAVED)
        if loads:
            load(model, optimizer, f"{folder}/checkpoint")
        else:
            train(model, optimizer, data=FIRST)
            dcp.save(state_of(model, optimizer), checkpoint_id=f"{folder}/checkpoint")
        out.append(train(model, optimizer, data=LAST))
    return out


SAVED = {**SHARED["low rank, momentum"], "base": torch.optim.AdamW}


@pytest.mark.filterwarnings("ignore")
def test_a_checkpoint_is_loaded_by_workers_alike_and_by_one_alone(outcomes):
    for went_on, again in (outcome["resumed"] for outcome in outcomes):
        assert [name for name, p in again.items() if not torch.equal(p, went_on[name])] == []
    model = new_model()
    optimizer = optimizer_for(model, **SAVED)
    load(model, optimizer, outcomes[0]["folder"] + "/checkpoint")
    assert farthest(train(model, optimizer, data=LAST), outcomes[0]["resumed"][0])[0] < 1e-6


def by_hand(mesh, dim, rows=None):
    """A convolution and a linear layer with split weights, whose input may be split by rows."""

    def split(name, module, mesh):
        for key, parameter in list(module.named_parameters(recurse=False)):
            placed = distribute_tensor(parameter.detach(), mesh, [dim] * mesh.ndim)
            module.register_parameter(key, nn.Parameter(placed))

    model = nn.Sequential(nn.Linear(4, 4, bias=False, dtype=torch.float64))
    if rows is None:
        model.append(nn.Conv1d(4, 4, 1, bias=False, dtype=torch.float64))
        return distribute_module(model, mesh, split)

    def enter(module, inputs, mesh):
        return distribute_tensor(inputs[0], mesh, [rows])

    return distribute_module(model, mesh, split, enter)


def refused(mesh):
    """What is said of what is not supported, by what it is."""
    out = {}
    for method in ("KFAC", "KBFGS", "SNGD", "HyLo"):
        model = parallelize_module(new_model(), mesh, dict(PLANS["whole rows"]))
        out[method] = message(ValueError, lambda: optimizer_for(model, method))  # noqa: B023
        assert not any(module._forward_hooks for module in (model.mix, model.head))
    model = by_hand(mesh, Shard(0))
    out["convolution"] = message(ValueError, lambda: optimizer_for(model))
    optimizer_for(model, skip=["1"])
    twice = by_hand(
        DeviceMesh("cpu", [[0], [1]]), Replicate()
    )  # one of its dimensions has length 1
    optimizer_for(twice)
    divided = by_hand(mesh, Shard(0), rows=Shard(0))
    optimizer = optimizer_for(divided)
    out["rows"] = message(RuntimeError, lambda: divided(torch.ones(6, 4, dtype=torch.float64)))
    assert optimizer.layers()[0].updates == 0
    narrow = by_hand(mesh, Shard(0))
    narrow[1] = nn.Linear(4, 1, bias=False, dtype=torch.float64)
    narrow[1].weight = nn.Parameter(distribute_tensor(narrow[1].weight.detach(), mesh, [Shard(0)]))
    out["narrow"] = message(ValueError, lambda: optimizer_for(narrow))
    return out


def message(kind, function):
    with pytest.raises(kind) as caught:
        function()
    return str(caught.value)


def test_methods_that_compare_whole_rows(outcomes):
    for said in (outcome["refused"] for outcome in outcomes):
        for method in ("KFAC", "KBFGS", "SNGD", "HyLo"):
            assert f"and {method} compares whole rows" in said[method]
            assert "use mkor.MKOR, mkor.auto or mkor.Eva, or shard the model by" in said[method]


def test_layers_that_are_split_in_other_ways(outcomes):
    said = outcomes[0]["refused"]
    assert said == outcomes[1]["refused"]
    assert (
        "layer '1' is a Conv1d whose weight is split by tensor parallelism" in said["convolution"]
    )
    assert "layer '0' gets its input as (3, 4) of (6, 4), but tensor-parallel" in said["rows"]
    assert (
        "layer '1' has 1 outputs, of which not every one of the 2 tensor-parallel" in said["narrow"]
    )


def on_two_meshes(rank):
    """Tensor parallelism inside of FSDP2."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shards", "tp"))
    both = by_hand(init_device_mesh("cpu", (2, 2)), Shard(0))
    out = {"both": message(ValueError, lambda: optimizer_for(both))}
    other = by_hand(mesh["tp"], Shard(0))
    other[1] = by_hand(mesh["shards"], Shard(0))[0]
    out["other"] = message(ValueError, lambda: optimizer_for(other))
    for name in TWO:
        model = parallelize_module(new_model(), mesh["tp"], dict(PLANS["whole rows"]))
        for module in (model.start, model.up, model.down, model.free_up, model.free):
            fully_shard(module, mesh=mesh["shards"])
        fully_shard(model, mesh=mesh["shards"], reshard_after_forward=name != "dense")
        optimizer = optimizer_for(model, **SHARED[name])
        trained = quietly(train, model, optimizer, share_of(rank // 2, 2))
        out[name] = trained, states(optimizer)
    return out


TWO = ("dense", "window", "low rank, momentum", "low rank, sketch", "auto", "Eva, clipped")


@pytest.mark.slow
def test_tensor_parallelism_inside_of_fsdp2(tmp_path, outcomes):
    found = spawn(on_two_meshes, tmp_path, workers=4)
    assert (
        "parameter '0.weight' is a DTensor spread over 2 dimensions of a mesh" in found[0]["both"]
    )
    told = "parameter '0.weight' is spread over the workers [0, 1] and '1.weight' over [0, 2]"
    assert told in found[0]["other"]
    for name in TWO:
        trained = same_everywhere([outcome[name][0] for outcome in found])
        same_everywhere([outcome[name][1] for outcome in found])
        model = new_model()
        alone = outcomes[0].get(name) or train(model, optimizer_for(model, **SHARED[name]))
        off, worst = farthest(trained, alone)
        assert off < 1e-6, (name, worst)
