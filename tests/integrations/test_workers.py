"""Two workers by each framework do what a plain loop does on the union of their batches."""

from pathlib import Path

import pytest
import torch

from integrations.common import batches, build, plain_loop, tiny
from torchrun import torchrun

pytest.importorskip("transformers")
pytest.importorskip("accelerate")
pytest.importorskip("lightning.pytorch")

SCRIPT = Path(__file__).with_name("workers_run.py")


# The Trainer multiplies the loss of a classification by the number of workers.
SCALES = {
    "accelerate": 1,
    "trainer": 2,
    "lightning": 1,
    "lightning by hand": 1,
    "lightning, sharded": 1,
    "lightning by hand, sharded": 1,
}


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_two_workers_are_one_on_the_union_of_their_batches(tmp_path):
    """All frameworks in one start of two processes."""
    torchrun(SCRIPT, tmp_path, timeout=200)
    outcomes = [torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in range(2)]
    parts = batches(12)
    union = [
        {key: torch.cat([one[key], two[key]]) for key in one}
        for one, two in zip(parts[::2], parts[1::2], strict=True)
    ]
    assert outcomes[0].keys() == SCALES.keys()
    for framework, (parameters, layers) in outcomes[0].items():
        torch.testing.assert_close(outcomes[1][framework], (parameters, layers), rtol=0, atol=0)
        model = tiny().double()
        optimizer = build(model)
        plain_loop(model, optimizer, union, divide=1 / SCALES[framework])
        expected = {key: tensor.detach() for key, tensor in model.named_parameters()}
        own = optimizer.state_dict()["preconditioner"]["layers"]
        assert own and all(layer["updates"] == 4 for layer in own.values())
        for found, there in ((parameters, expected), (layers, own)):
            torch.testing.assert_close(found, there, rtol=1e-8, atol=1e-8, msg=framework)
