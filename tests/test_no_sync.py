"""A step never waits for the device: it reads no value of a tensor, on any path.

On an accelerator each such read stops the host until the device has caught up. A dispatch mode
sees them on the CPU as well.
"""

from contextlib import contextmanager

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import mkor

aten = torch.ops.aten
READS = {
    aten._local_scalar_dense.default,
    aten.item.default,
    aten.is_nonzero.default,
    aten.equal.default,
    aten.nonzero.default,
    aten.masked_select.default,
}
"""Operations that give the host a value, or a shape that depends on values."""

COPIES = {torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.cpu}
"""Methods that hand a tensor over to the host."""

FROM_HOST = {aten.lift_fresh.default, aten.lift_fresh_copy.default}
"""What `torch.tensor(…)` ends in: on an accelerator a copy that the host waits for."""


class NoReads(TorchDispatchMode):
    """Fails on operations that would wait for the device."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        by_mask = func is aten.index.Tensor and any(
            index is not None and index.dtype == torch.bool for index in args[1]
        )
        if func in READS or by_mask:
            raise AssertionError(f"{func} reads a tensor's value")
        if func in FROM_HOST:
            raise AssertionError(f"{func} builds a tensor from values on the host")
        return func(*args, **(kwargs or {}))


class NoCopies(TorchFunctionMode):
    """Fails on methods that copy to the host."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func in COPIES:
            raise AssertionError(f"{func} reads a tensor's value")
        return func(*args, **(kwargs or {}))


@contextmanager
def no_sync():
    """Fail on whatever would make the host wait for the device."""
    with NoCopies(), NoReads():
        yield


class Net(nn.Module):
    """A layer of each kind."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv1d(3, 4, 2, groups=1, bias=False)
        self.up = nn.ConvTranspose1d(4, 6, 2)
        self.mix = nn.MultiheadAttention(6, 2, batch_first=True)
        self.head = nn.Linear(6, 2)
        self.plain = nn.Linear(2, 2, bias=False)

    def forward(self, x):
        h = torch.tanh(self.up(torch.tanh(self.conv(x)))).mT
        return self.plain(self.head(self.mix(h, h, h, need_weights=False)[0]))


def build(foreach, dtype=torch.float32, **options):
    torch.manual_seed(0)
    model = Net().to(dtype)
    base = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=foreach)
    options = {"factor_update_steps": 2, "warmup_steps": 1, **options}
    return model, mkor.MKOR(model, base, **options)


def backward(model, dtype=torch.float32):
    F.cross_entropy(model(torch.randn(3, 3, 5, dtype=dtype)).mT, torch.ones(3, 5).long()).backward()


@pytest.mark.parametrize(
    "read",
    [
        lambda t: t.sum().item(),
        lambda t: bool((t > 0).all()),
        lambda t: float(t[0]),
        lambda t: t[t > 0],
        lambda t: t.tolist(),
        lambda t: t.numpy(),
        lambda t: t.cpu(),
        torch.nonzero,
        lambda t: torch.equal(t, t),
        lambda t: torch.tensor([1.0, 2.0]),
    ],
)
def test_the_mode_catches_reads(read):
    with pytest.raises(AssertionError, match=r"reads a tensor|from values on the host"), no_sync():
        read(torch.ones(3))


def test_the_mode_catches_a_read_inside_a_step():
    model, optimizer = build(foreach=False, on_nonfinite="raise")
    backward(model)
    with pytest.raises(AssertionError, match=r"reads a tensor.s value"), no_sync():
        optimizer.step()


@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("on_nonfinite", ["skip", "reset"])
@pytest.mark.parametrize("vectors", [1, 3])
@pytest.mark.parametrize("rule", ["exact", "paper", "reference"])
def test_a_step_reads_no_value(rule, vectors, on_nonfinite, foreach):
    model, optimizer = build(foreach, rule=rule, vectors=vectors, on_nonfinite=on_nonfinite)
    # Updates are due in steps 0, 2 and 4; the first also makes the state.
    for updates in (1, 1, 2, 2, 3):
        backward(model)
        with no_sync():
            optimizer.step()
            optimizer.zero_grad()
        assert [info.updates for info in optimizer.layers() if info.preconditioned] == [updates] * 6


@pytest.mark.parametrize("options", [{"damping": None}, {"rescale": None}, {"max_dim": 6}])
@pytest.mark.parametrize("state_dtype", [None, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("rule", ["exact", "paper", "reference"])
def test_options_read_no_value(rule, state_dtype, options):
    model, optimizer = build(False, rule=rule, state_dtype=state_dtype, **options)
    for _ in range(3):
        backward(model)
        with no_sync():
            optimizer.step()


BESIDE_DENSE = {"max_dim": 4, "wide_sides": "window"}


@pytest.mark.parametrize("statistic", ["mean", "sketch"])
@pytest.mark.parametrize("on_nonfinite", ["skip", "reset"])
@pytest.mark.parametrize("state_dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("kept", [{"representation": "window"}, BESIDE_DENSE], ids=["all", "wide"])
def test_a_window_reads_no_value(kept, state_dtype, on_nonfinite, statistic):
    options = {"state_dtype": state_dtype, "on_nonfinite": on_nonfinite, "statistic": statistic}
    # No wider than some sides: those keep their whole average, by an eigendecomposition.
    model, optimizer = build(False, window=2, vectors=2, **kept, **options)
    for _ in range(3):
        with no_sync():
            backward(model)
            optimizer.step()


@pytest.mark.parametrize("representation", ["window", "lowrank"])
def test_steps_between_updates_read_no_value(representation):
    model, optimizer = build(False, representation=representation)
    for step in range(4):
        backward(model)
        if step % 2:
            with no_sync():
                optimizer.step()
        else:
            optimizer.step()


@pytest.mark.parametrize("vectors", [1, 3])
def test_the_hooks_read_no_value(vectors):
    model, optimizer = build(False, vectors=vectors)
    for _ in range(3):
        with no_sync():
            backward(model)
            optimizer.step()


def test_precondition_reads_no_value_whatever_the_base():
    torch.manual_seed(0)
    model = Net()
    optimizer = mkor.MKOR(model, torch.optim.Adam(model.parameters()), warmup_steps=1)
    for _ in range(2):
        backward(model)
        with no_sync():
            optimizer.precondition()
        optimizer.base.step()


@pytest.mark.parametrize("lr", [0.1, torch.tensor(0.1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_grad_norm": None, "bias_correction": False, "maximize": True},
        {"weight_decay_mode": "decoupled", "trust_ratio": "all", "max_weight_norm": 1.0},
    ],
)
def test_lamb_reads_no_value(options, dtype, lr):
    model = Net().to(dtype)
    optimizer = mkor.LAMB(model.parameters(), lr, **options)
    for _ in range(2):
        backward(model, dtype)
        with no_sync():
            optimizer.step()


@pytest.mark.gpu
@pytest.mark.parametrize("lr", [0.1, torch.tensor(0.1)])
def test_lamb_on_the_device_does_not_wait(lr):
    model = Net().cuda()
    optimizer = mkor.LAMB(model.parameters(), lr)
    for _ in range(3):
        model(torch.randn(3, 3, 5, device="cuda")).square().mean().backward()
        torch.cuda.set_sync_debug_mode("error")
        try:
            optimizer.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
@pytest.mark.parametrize("rule", ["exact", "paper", "reference"])
def test_a_step_on_the_device_does_not_wait(rule):
    torch.manual_seed(0)
    model = Net().cuda()
    base = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = mkor.MKOR(model, base, rule=rule, factor_update_steps=2, warmup_steps=1)
    for _ in range(4):
        model(torch.randn(3, 3, 5, device="cuda")).square().mean().backward()
        torch.cuda.set_sync_debug_mode("error")
        try:
            optimizer.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        optimizer.zero_grad()
