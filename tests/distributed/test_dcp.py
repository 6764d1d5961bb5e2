"""torch.distributed.checkpoint: saved on some workers, loaded on others, DDP and FSDP2."""

import warnings

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from gloo import spawn
from sharded_runs import batches, farthest, new_model, optimizer_for, share_of, train

JOBS = {
    "dense": {},
    "low rank": {"representation": "lowrank", "rank": 3},
    "momentum": {
        **{"representation": "lowrank", "rank": 3, "momentum": 0.9, "rescale": "rms"},
    },
    "K-FAC": {"method": "KFAC"},
    "K-BFGS": {"method": "KBFGS"},
    "SNGD": {"method": "SNGD"},
    "HyLo, auto": {"method": "HyLo", "rank": 1.0, "switch_steps": 2},
}
DATA = list(batches(torch.float64, 8))
FIRST, LAST = DATA[:5], DATA[5:]


def build(kind, options):
    """A model, spread or not, and its optimizer with AdamW inside."""
    model = new_model()
    if kind == "fsdp":
        for module in (model.free, model.branch, model.head):
            fully_shard(module)
        fully_shard(model)
    elif kind == "ddp":
        model = DistributedDataParallel(model)
    return model, optimizer_for(model, base=torch.optim.AdamW, **options)


def state_of(model, optimizer):
    return {
        "model": get_model_state_dict(model),
        "optimizer": get_optimizer_state_dict(model, optimizer.base),
        "factors": optimizer.factors,
    }


def load(model, optimizer, path):
    state = state_of(model, optimizer)
    dcp.load(state, checkpoint_id=path)
    set_model_state_dict(model, state["model"])
    set_optimizer_state_dict(model, optimizer.base, state["optimizer"])


def save_and_load(rank, path, kinds):
    """Train, save half-way and go on; then load and go on, by the kind of the first and of others.

    Returns the parameters in the end by job, of the run that went on and of those that loaded.
    """
    warnings.simplefilter("ignore")  # torch's own, of its serialisation and its hooks
    share = share_of(rank, dist.get_world_size())
    out = {}
    for name, options in JOBS.items():
        model, optimizer = build(kinds[0], options)
        train(model, optimizer, share, data=FIRST)
        dcp.save(state_of(model, optimizer), checkpoint_id=f"{path}/{name}")
        out[name] = [train(model, optimizer, share, data=LAST)]
        for kind in kinds:
            model, optimizer = build(kind, options)
            load(model, optimizer, f"{path}/{name}")
            out[name].append(train(model, optimizer, share, data=LAST))
    return out


def load_only(rank, path):
    warnings.simplefilter("ignore")
    out = {}
    for name, options in JOBS.items():
        model, optimizer = build("fsdp", options)
        load(model, optimizer, f"{path}/{name}")
        out[name] = train(model, optimizer, share_of(rank, 2), data=LAST)
    return out


def alone(path, name):
    model, optimizer = build("plain", JOBS[name])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        load(model, optimizer, f"{path}/{name}")
    return train(model, optimizer, data=LAST)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_saved_on_two_workers_and_loaded_on_two_and_one(tmp_path):
    """FSDP2 to FSDP2 to the bit; to DDP, and to a single worker without any, to rounding."""
    path = str(tmp_path / "checkpoint")
    outcomes = spawn(save_and_load, tmp_path, path, ("fsdp", "ddp"), timeout=250)
    for name, (saved, again, other) in outcomes[0].items():
        unequal = [n for n, p in again.items() if not torch.equal(p, saved[n])]
        assert unequal == [], name
        assert farthest(other, saved)[0] < 1e-6, name
        assert farthest(alone(path, name), saved)[0] < 1e-6, name


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize(("kind", "bound"), [("ddp", 1e-9), ("fsdp", 0.0)])
def test_saved_on_four_workers_and_loaded_on_two_and_one(tmp_path, kind, bound):
    """To four, where DDP's buckets may add up in another order; FSDP2 on two; one without any."""
    path = str(tmp_path / "checkpoint")
    for made in ("four", "two"):
        (tmp_path / made).mkdir()
    arguments = (path, (kind,))
    saved = spawn(save_and_load, tmp_path / "four", *arguments, workers=4, timeout=250)[0]
    loaded = spawn(load_only, tmp_path / "two", path, timeout=140)[0]
    for name, (went_on, again) in saved.items():
        assert farthest(again, went_on)[0] <= bound, name
        assert farthest(loaded[name], went_on)[0] < 1e-6, name
        assert farthest(alone(path, name), went_on)[0] < 1e-6, name


@pytest.mark.filterwarnings("ignore")  # torch's own, of its serialisation
def test_auto_whose_base_has_no_state_of_matrices(tmp_path):
    def build_auto():
        model = new_model()
        return model, optimizer_for(model, "auto")

    model, optimizer = build_auto()
    train(model, optimizer, data=FIRST)
    dcp.save(state_of(model, optimizer), checkpoint_id=tmp_path, no_dist=True)
    went_on = train(model, optimizer, data=LAST)
    model, optimizer = build_auto()
    state = state_of(model, optimizer)
    dcp.load(state, checkpoint_id=tmp_path, no_dist=True)
    set_model_state_dict(model, state["model"])
    lenient = StateDictOptions(strict=False)
    set_optimizer_state_dict(model, optimizer.base, state["optimizer"], options=lenient)
    again = train(model, optimizer, data=LAST)
    assert all(torch.equal(again[name], went_on[name]) for name in went_on)


def misuse(rank, path):
    """What users are told who pass the optimizer itself, or load another's factors."""
    warnings.simplefilter("ignore")
    model, optimizer = build("fsdp", JOBS["dense"])
    train(model, optimizer, share_of(rank, 2), data=FIRST)
    state = {"optimizer": get_optimizer_state_dict(model, optimizer)}
    with pytest.raises(ValueError, match=r"no factors.*optimizer\.base; beside it, save optimizer"):
        set_optimizer_state_dict(model, optimizer, state["optimizer"])
    dcp.save({"factors": optimizer.factors}, checkpoint_id=path)
    _, other = build("fsdp", JOBS["K-FAC"])
    with pytest.raises(ValueError, match="saved by method 'mkor', this is 'kfac'"):
        dcp.load({"factors": other.factors}, checkpoint_id=path)
    assert all(info.updates == 0 for info in other.layers())


def test_what_cannot_be_loaded(tmp_path):
    spawn(misuse, tmp_path, str(tmp_path / "checkpoint"))
