"""A worker that is killed under torchrun: all start again from the last checkpoint."""

import os
from pathlib import Path

import pytest
import torch

from sharded_runs import batches, farthest, new_model, optimizer_for, train
from torchrun import torchrun

TESTS = Path(__file__).parents[1]
NEW_STORE = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
"""Without it gloo finds the addresses of the workers before the restart, and may wait for those."""


@pytest.mark.slow
@pytest.mark.timeout(250)
def test_a_killed_worker_starts_again(tmp_path):
    path = os.pathsep.join([str(TESTS), str(TESTS.parent / "src")])
    torchrun(
        *(TESTS / "elastic_run.py", tmp_path, "fsdp"),
        timeout=180,
        env={**NEW_STORE, "PYTHONPATH": path},
        options=("--max-restarts", "1"),
    )
    assert (tmp_path / "killed").exists()
    result = torch.load(tmp_path / "result.pt")
    assert result["first"] == 3
    model = new_model()
    options = {"representation": "lowrank", "rank": 3}
    optimizer = optimizer_for(model, base=torch.optim.AdamW, **options)
    alone = train(model, optimizer, data=list(batches(torch.float64, 6)))
    assert farthest(result["parameters"], alone)[0] < 1e-6
