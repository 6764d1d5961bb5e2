"""A worker that is killed under torchrun: all start again from the last checkpoint."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from sharded_runs import batches, farthest, new_model, optimizer_for, train

TESTS = Path(__file__).parents[1]
NEW_STORE = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
"""Without it gloo finds the addresses of the workers before the restart, and may wait for those."""


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_a_killed_worker_starts_again(tmp_path):
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["--max-restarts", "1", str(TESTS / "elastic_run.py"), str(tmp_path), "fsdp"]
    path = os.pathsep.join([str(TESTS), str(TESTS.parent / "src")])
    run = subprocess.run(
        [sys.executable, *command],
        capture_output=True,
        check=False,
        env={**os.environ, **NEW_STORE, "OMP_NUM_THREADS": "1", "PYTHONPATH": path},
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
