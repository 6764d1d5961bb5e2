"""FSDP2: training on sharded parameters is training on whole ones."""

import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

import mkor
from gloo import spawn
from mkor.distributed import comm
from sharded_runs import farthest, new_model, optimizer_for, parameters, share_of, train

THIN = {"representation": "lowrank", "rank": 3}
METHODS = {
    "dense": {},
    "dense, three vectors": {"vectors": 3},
    "dense, paper": {"rule": "paper"},
    "dense, raw": {"damping": None},
    "window": {"representation": "window", "window": 3},
    "low rank": THIN,
    "dense and a window": {"max_dim": 4, "wide_sides": "window", "window": 3},
    "dense and low rank": {"max_dim": 4, "wide_sides": "lowrank", "rank": 3},
    "low rank, clipped": {**THIN, "rescale": None, "kl_clip": 1e-3},
    "low rank, momentum": {**THIN, "momentum": 0.9, "rescale": "rms"},
    "low rank, sized by inputs": {**THIN, "momentum": 0.9, "rescale": "fan_in"},
    "dense, momentum": {"momentum": 0.9},
    "auto": {"method": "auto"},
    "K-FAC, eigen": {"method": "KFAC"},
    "K-FAC, inverse": {"method": "KFAC", "solver": "inverse"},
    "Eva": {"method": "Eva"},
    "K-BFGS": {"method": "KBFGS"},
    "K-BFGS, pairs": {"method": "KBFGS", "memory": 3},
    "SNGD": {"method": "SNGD"},
    "HyLo-KID, all rows": {"method": "HyLo", "sampling": "kid", "rank": 1.0},
    "HyLo, clipped": {"method": "HyLo", "sampling": "kid", "rank": 1.0, "kl_clip": 1e-3},
    "HyLo-KIS": {"method": "HyLo", "sampling": "kis", "rank": 0.5},
    "low rank, sketch": {**THIN, "statistic": "sketch", "vectors": 3},
    "window, sketch": {
        **{"representation": "window", "window": 4, "statistic": "sketch"},
        "vectors": 2,
    },
}
BY_WORKER = ("dense, three vectors", "HyLo-KIS", "low rank, sketch", "window, sketch", "auto")
"""Blocks, draws and signs depend on the worker: these are compared with DDP."""

JOBS = [(name, True) for name in METHODS] + [("dense", False), ("low rank", False)]
"""Methods, and whether parameters are given back after the forward pass."""


def sharded(model, reshard=True, mesh=None, policy=None):
    options = {"reshard_after_forward": reshard, "mp_policy": policy or MixedPrecisionPolicy()}
    for module in (model.conv, model.free, model.branch, model.head):
        fully_shard(module, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def quietly(function, *arguments, **options):
    """torch tells of the outputs that its hooks of FSDP2 don't know how to handle."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return function(*arguments, **options)


def every_method(rank):
    results = {}
    share = share_of(rank, dist.get_world_size())
    for name, reshard in JOBS:
        model = sharded(new_model(), reshard)
        optimizer = optimizer_for(model, **METHODS[name])
        results[name, reshard] = quietly(train, model, optimizer, share), states(optimizer)
    for name in BY_WORKER:
        model = DistributedDataParallel(new_model())
        results[name] = train(model, optimizer_for(model, **METHODS[name]), share)
    return results


def states(optimizer):
    layers = optimizer.state_dict()["preconditioner"]["layers"]
    return {f"{n} {k}": t for n, layer in layers.items() for k, t in layer["state"].items()}


def same_everywhere(results):
    """The results of the first worker, equal to the bit on all others."""
    for other in results[1:]:
        assert other.keys() == results[0].keys()
        unequal = [key for key, tensor in other.items() if not torch.equal(tensor, results[0][key])]
        assert unequal == []
    return results[0]


def test_a86_sharded_equals_unsharded_for_every_method(tmp_path):
    """One row weights among them, whose second shard is empty."""
    outcomes = spawn(every_method, tmp_path)
    for job in JOBS:
        if job[0] in BY_WORKER:
            alone = outcomes[0][job[0]]
        else:
            model = new_model()
            alone = train(model, optimizer_for(model, **METHODS[job[0]]))
        trained = same_everywhere([outcome[job][0] for outcome in outcomes])
        same_everywhere([outcome[job][1] for outcome in outcomes])
        off, worst = farthest(trained, alone)
        assert off < 1e-6, (job, worst)


HYBRID = [name for name in METHODS if name not in ("low rank, clipped", "HyLo, clipped")]


def hybrid_mesh(rank):
    mesh = dist.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))
    share = share_of(rank, 4)
    out = {}
    for name in HYBRID:
        model = sharded(new_model(), mesh=mesh)
        optimizer = optimizer_for(model, **METHODS[name])
        out[name] = quietly(train, model, optimizer, share), states(optimizer)
        if name in BY_WORKER:
            model = DistributedDataParallel(new_model())
            alone = optimizer_for(model, **METHODS[name])
            out[name] += (train(model, alone, share),)
    return out


@pytest.mark.slow
def test_a_hybrid_mesh_of_four_workers(tmp_path):
    """Rows sharded over two workers, replicated twice: every method and representation."""
    outcomes = spawn(hybrid_mesh, tmp_path, workers=4)
    for name in HYBRID:
        trained = same_everywhere([outcome[name][0] for outcome in outcomes])
        same_everywhere([outcome[name][1] for outcome in outcomes])
        if name in BY_WORKER:
            alone = outcomes[0][name][2]
        else:
            model = new_model()
            alone = train(model, optimizer_for(model, **METHODS[name]))
        off, worst = farthest(trained, alone)
        assert off < 1e-6, (name, worst)


class Counter:
    """Counts what crosses in collectives of torch.distributed and in gathers of DTensors."""

    def __enter__(self):
        self.reduced, self.gathered = [], 0
        self.all_reduce, self.whole = dist.all_reduce, torch.distributed.tensor.DTensor.full_tensor

        def all_reduce(tensor, *args, **kwargs):
            self.reduced.append(tensor.numel())
            return self.all_reduce(tensor, *args, **kwargs)

        def full_tensor(tensor, *args, **kwargs):
            self.gathered += 1
            return self.whole(tensor, *args, **kwargs)

        comm.dist.all_reduce = all_reduce
        torch.distributed.tensor.DTensor.full_tensor = full_tensor
        return self

    def __exit__(self, *exc):
        comm.dist.all_reduce = self.all_reduce
        torch.distributed.tensor.DTensor.full_tensor = self.whole


def wire(rank):
    """What a step without an update of the factors sends, by representation."""
    out = {}
    for name, options in {"thin": THIN, "dense": {}}.items():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 4))
        for layer in (model[0], model[2]):
            fully_shard(layer)
        fully_shard(model)
        base = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = mkor.MKOR(model, base, factor_update_steps=100, warmup_steps=1, **options)
        for _ in range(2):
            quietly(lambda: model(torch.randn(5, 8)).square().mean().backward())  # noqa: B023
            with Counter() as counter:
                optimizer.precondition()
            optimizer.zero_grad()
        out[name] = (counter.reduced, counter.gathered)
    return out


def test_thin_factors_gather_no_gradient(tmp_path):
    """Only products with their rows cross, k·i numbers a layer, and the norms: 2 collectives."""
    (sent, _) = spawn(wire, tmp_path)
    assert sent["thin"] == ([3 * 9 + 3 * 7, 2 * 2], 0)
    assert sent["dense"] == ([], 4)  # each weight and bias, a layer at a time


def precision(rank):
    """Parameters in float32 and computing in bfloat16; micro-batches; parameters made late."""
    share = share_of(rank, 2)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = sharded(new_model(torch.float32), policy=policy)
    optimizer = optimizer_for(model, **THIN)
    mixed = quietly(train, model, optimizer, share, dtype=torch.float32)
    assert {s.dtype for k, s in states(optimizer).items() if "events" not in k} == {torch.float32}
    model = sharded(new_model())
    steps = quietly(train, model, optimizer_for(model, **THIN), share, micro=3)
    return mixed, steps


def distance(actual, expected):
    return sum(float((actual[n] - t).square().sum()) for n, t in expected.items()) ** 0.5


def test_mixed_precision_and_micro_batches(tmp_path):
    outcomes = spawn(precision, tmp_path)
    mixed, steps = (same_everywhere([o[i] for o in outcomes]) for i in range(2))
    model = new_model(torch.float32)
    start = parameters(model)
    alone = train(model, optimizer_for(model, **THIN), dtype=torch.float32)
    assert 0 < distance(mixed, alone) < 0.1 * distance(start, alone)
    model = new_model()
    assert farthest(steps, train(model, optimizer_for(model, **THIN)))[0] < 1e-6


def late(rank):
    """Parameters on the meta device, filled before or after the optimizer is built."""
    source = new_model().state_dict()
    out = []
    for first in (True, False):
        with torch.device("meta"):
            model = sharded(new_model())
        optimizer = optimizer_for(model, **THIN) if first else None
        model.to_empty(device="cpu")
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                whole = torch.distributed.tensor.distribute_tensor(
                    source[name], parameter.device_mesh, parameter.placements
                )
                parameter.copy_(whole)
        optimizer = optimizer or optimizer_for(model, **THIN)
        out.append(quietly(train, model, optimizer, share_of(rank, 2)))
    return out


def test_parameters_made_after_the_optimizer(tmp_path):
    outcomes = spawn(late, tmp_path)
    model = new_model()
    alone = train(model, optimizer_for(model, **THIN))
    for index in range(2):
        trained = same_everywhere([outcome[index] for outcome in outcomes])
        assert farthest(trained, alone)[0] < 1e-6, index


def sharded_too_late(rank):
    """The error, and how far a step got; then training around the base that was handed over.

    As frameworks do that shard a model together with its optimizer.
    """
    model = new_model()
    optimizer = optimizer_for(model, **THIN)
    base, names = optimizer.base, [name for name, _ in model.named_parameters()]
    sharded(model)
    own = dict(model.named_parameters())
    base.param_groups[0]["params"] = [own[name] for name in names]
    before = parameters(model)
    with pytest.raises(RuntimeError) as error:
        quietly(train, model, optimizer, share_of(rank, 2))
    unchanged = farthest(parameters(model), before)[0] == 0
    optimizer.close()
    base.zero_grad()
    again = mkor.MKOR(model, base, factor_update_steps=2, warmup_steps=3, **THIN)
    return str(error.value), unchanged, quietly(train, model, again, share_of(rank, 2))


def test_a86_a_model_that_is_sharded_after_the_optimizer_was_built(tmp_path):
    outcomes = spawn(sharded_too_late, tmp_path)
    for text, unchanged, _ in outcomes:
        assert text.startswith("the weight of layer 'conv' was sharded after the optimizer was bui")
        assert unchanged
    model = new_model()
    alone = train(model, optimizer_for(model, **THIN))
    trained = same_everywhere([outcome[2] for outcome in outcomes])
    assert farthest(trained, alone)[0] < 1e-6
