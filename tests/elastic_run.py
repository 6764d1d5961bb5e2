"""A training that checkpoints every step and dies once; run by torchrun, see test_elastic."""

import os
import signal
import sys
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from distributed.test_dcp import build, load, state_of
from sharded_runs import batches, parameters, share_of, train


def main(folder, kind):
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, workers = dist.get_rank(), dist.get_world_size()
    model, optimizer = build(kind, {"representation": "lowrank", "rank": 3})
    done, killed = folder / "done", folder / "killed"
    first = int(done.read_text()) if done.exists() else 0
    if first:
        load(model, optimizer, f"{folder}/step{first}")
    for step, batch in enumerate(batches(torch.float64, 6)):
        if step < first:
            continue
        if step == 3 and rank == 1 and not killed.exists():
            killed.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        train(model, optimizer, share_of(rank, workers), data=[batch])
        dcp.save(state_of(model, optimizer), checkpoint_id=f"{folder}/step{step + 1}")
        if rank == 0:
            done.write_text(str(step + 1))
        dist.barrier()
    trained = parameters(model)
    if rank == 0:
        torch.save({"parameters": trained, "first": first}, folder / "result.pt")
    dist.barrier()
    # Not by the interpreter's end: gloo's threads abort there now and then after a checkpoint
    # (pytorch/pytorch#179291), with plain AdamW too.
    os._exit(0)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
