"""A worker that is killed under torchrun: all start again from the last checkpoint."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from sharded_runs import batches, farthest, new_model, optimizer_for, train

TESTS = Path(__file__).parents[1]


@pytest.mark.skipif(
    not os.environ.get("MKOR_ELASTIC"),
    reason="gloo's workers don't always find each other after a restart; MKOR_ELASTIC=1 runs it",
)
@pytest.mark.slow
@pytest.mark.timeout(200)
def test_a_killed_worker_starts_again(tmp_path):
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    # One is needed; on a busy machine a restarted worker may not find the other in time.
    command += ["--max-restarts", "3", str(TESTS / "elastic_run.py"), str(tmp_path), "fsdp"]
    path = os.pathsep.join([str(TESTS), str(TESTS.parent / "src")])
    run = subprocess.run(
        [sys.executable, *command],
        capture_output=True,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path},
        text=True,
        timeout=180,
    )
    assert run.returncode == 0, run.stderr
    assert (tmp_path / "killed").exists()
    result = torch.load(tmp_path / "result.pt")
    assert result["first"] == 3
    model = new_model()
    options = {"representation": "lowrank", "rank": 3}
    optimizer = optimizer_for(model, base=torch.optim.AdamW, **options)
    alone = train(model, optimizer, data=list(batches(torch.float64, 6)))
    assert farthest(result["parameters"], alone)[0] < 1e-6
