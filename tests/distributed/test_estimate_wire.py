"""What `mkor.estimate` says crosses the network, against the collectives themselves."""

import pytest
import torch
from torch import nn

import mkor
from collectives import counted
from gloo import spawn
from method_cases import CASES

ROWS = 6
CASES = {
    **CASES,
    "kfac bfloat16 on the wire": (mkor.KFAC, {"wire_dtype": torch.bfloat16}),
    "hylo bfloat16 on the wire": (mkor.HyLo, {"sampling": "kis", "wire_dtype": torch.bfloat16}),
    "kfac float16 on the wire": (mkor.KFAC, {"wire_dtype": torch.float16}),
    "hylo float16 on the wire": (mkor.HyLo, {"sampling": "kis", "wire_dtype": torch.float16}),
    "kfac memory": (mkor.KFAC, {"grad_worker_fraction": 0.01}),
    "kfac inverse half": (mkor.KFAC, {"solver": "inverse", "grad_worker_fraction": 0.5}),
    "mkor memory": (mkor.MKOR, {"grad_worker_fraction": 0.01}),
}
DIVIDED = ["kfac memory", "kfac inverse half", "mkor memory"]
SAME_WIRE = ("reset", "paper", "reference", "plain", "raw")
ON_WIRE = [name for name in CASES if not name.endswith(SAME_WIRE)]
ON_FOUR = [
    "mkor",
    "mkor lowrank sketch",
    "kfac inverse",
    "eva",
    "kbfgs",
    "sngd",
    "hylo kid",
    *DIVIDED,
]


class Net(nn.Module):
    """Layers with and without a bias, and groups, all of which see `ROWS` rows."""

    def __init__(self):
        super().__init__()
        self.biased = nn.Linear(5, 4)
        self.free = nn.Linear(4, 6, bias=False)
        self.conv = nn.Conv1d(6, 4, 1, groups=2)
        self.wide = nn.Linear(4, 3, bias=False, dtype=torch.float64)

    def forward(self, rows):
        hidden = self.free(self.biased(rows).tanh()).tanh()
        return self.wide(self.conv(hidden[..., None])[..., 0].double())


def run(cls, options):
    """Two updates; the bytes of the second's collectives by kind, and of the state by layer."""
    torch.manual_seed(3)
    model = Net()
    base = torch.optim.SGD(model.parameters(), lr=0.01)
    optimizer = cls(model, base, **options)

    def closure():
        optimizer.zero_grad()
        loss = model(torch.randn(ROWS, 5)).square().mean()
        loss.backward()
        return loss

    for _ in range(2):
        with counted() as calls:
            optimizer.step(closure)
    return calls, {layer.name: layer.bytes for layer in optimizer.layers()}


def worker(rank, names):
    del rank
    return {name: run(*CASES[name]) for name in names}


@pytest.mark.parametrize(("workers", "names"), [(1, list(CASES)), (2, ON_WIRE), (4, ON_FOUR)])
def test_bytes_are_those_of_the_collectives_and_of_the_state(tmp_path, workers, names):
    """All methods in one group of processes: starting them is what takes time."""
    kinds = {"all_reduce": "sum", "all_gather": "gather"}
    alone = workers == 1
    found = (
        [worker(0, names)]
        if alone
        else spawn(worker, tmp_path, names, workers=workers, timeout=240)
    )
    for name in names:
        cls, options = CASES[name]
        told = mkor.estimate(Net(), cls, rows=ROWS, workers=workers, **options)
        assert (told.wire == 0) is alone
        collectives = told.updates[0].collectives + told.step_collectives
        expected = [(c.kind, c.bytes) for c in collectives]
        counts = [[(kinds[kind], size) for kind, size in rank[name][0]] for rank in found]
        assert all(len(own) == len(expected) for own in counts), name
        assert [max(column) for column in zip(*counts, strict=True)] == expected, name
        assert tuple(sum(rank[name][1].values()) for rank in found) == told.bytes_by_worker, name
        kept = {layer.name: layer.bytes for layer in told.layers}
        for _, state in (rank[name] for rank in found):
            assert all(size in {0, kept[layer]} for layer, size in state.items()), name
        if name not in DIVIDED:
            assert counts == [expected] * workers and found[-1][name][1] == kept, name
