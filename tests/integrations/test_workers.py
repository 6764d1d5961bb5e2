"""Two workers under DDP by each framework do what a plain loop does on the union of batches."""

from pathlib import Path

import pytest
import torch

from integrations.common import assert_agree, batches, build, plain_loop, tiny
from torchrun import torchrun

pytest.importorskip("transformers")
pytest.importorskip("accelerate")
pytest.importorskip("lightning.pytorch")

SCRIPT = Path(__file__).with_name("workers_run.py")


def loaded(path):
    state = torch.load(path, weights_only=True)
    model = tiny().double()
    model.load_state_dict(state["model"])
    optimizer = build(model)
    optimizer.load_state_dict(state["optimizer"])
    return model, optimizer


# The Trainer multiplies the loss of a classification by the number of workers.
SCALES = {"accelerate": 1, "trainer": 2, "lightning": 1}


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("framework", SCALES)
def test_two_workers_are_one_on_the_union_of_their_batches(framework, tmp_path):
    torchrun(SCRIPT, framework, tmp_path, timeout=200)
    here, there = (loaded(tmp_path / f"{rank}.pt") for rank in range(2))
    assert_agree(*here, *there)
    parts = batches(12)
    union = [
        {key: torch.cat([one[key], other[key]]) for key in one}
        for one, other in zip(parts[::2], parts[1::2], strict=True)
    ]
    model = tiny().double()
    optimizer = build(model)
    plain_loop(model, optimizer, union, divide=1 / SCALES[framework])
    assert_agree(*here, model, optimizer, 1e-8)
