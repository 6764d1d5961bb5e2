"""LAMB's rule against plain Python, for every combination of its options."""

import itertools
import math
import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import mkor
from mkor.baselines import batches, lamb

DEFAULTS = {
    "lr": 0.01,
    "betas": (0.9, 0.999),
    "eps": 1e-6,
    "weight_decay": 0.01,
    "max_grad_norm": 1.0,
    "bias_correction": True,
    "trust_ratio": "decayed",
    "max_weight_norm": None,
    "weight_decay_mode": "inside",
    "maximize": False,
}
CHOICES = {
    "weight_decay": (0.0, 0.1),
    "max_grad_norm": (None, 0.5, 1e3),
    "bias_correction": (True, False),
    "trust_ratio": ("decayed", "all"),
    "max_weight_norm": (None, 0.3),
    "weight_decay_mode": ("inside", "decoupled"),
    "maximize": (False, True),
}
COMBINATIONS = [
    dict(zip(CHOICES, values, strict=True)) for values in itertools.product(*CHOICES.values())
]
SHAPES = ((3, 2), (4,), (), (2, 1, 2))


def norm(values):
    return math.sqrt(math.fsum(v * v for v in values))


class Oracle:
    """LAMB on lists of Python floats, one after the other, as the paper writes it."""

    def __init__(self, groups):
        self.groups = [
            (params, {**DEFAULTS, **options}, [[[0.0] * len(w), [0.0] * len(w), 0] for w in params])
            for params, options in groups
        ]

    def step(self, gradients):
        everything = [g for group in gradients for grad in group if grad is not None for g in grad]
        total = norm(everything)
        for (params, options, state), group in zip(self.groups, gradients, strict=True):
            limit = options["max_grad_norm"]
            clip = total / limit if limit is not None and total > limit else 1.0
            for i, grad in enumerate(group):
                if grad is not None:
                    sign = -1 if options["maximize"] else 1
                    grad = [sign * g / clip for g in grad]
                    params[i] = self.updated(params[i], grad, state[i], options)

    @staticmethod
    def updated(w, grad, state, options):
        (b1, b2), decay, lr = options["betas"], options["weight_decay"], options["lr"]
        state[0] = m = [b1 * old + (1 - b1) * g for old, g in zip(state[0], grad, strict=True)]
        state[1] = v = [b2 * old + (1 - b2) * g * g for old, g in zip(state[1], grad, strict=True)]
        state[2] += 1
        c1, c2 = 1 - b1 ** state[2], 1 - b2 ** state[2]
        if not options["bias_correction"]:
            c1 = c2 = 1.0
        u = [
            (a / c1) / (math.sqrt(b / c2) + options["eps"]) if options["eps"] or b else math.nan
            for a, b in zip(m, v, strict=True)
        ]
        if options["weight_decay_mode"] == "decoupled":
            w = [x * (1 - lr * decay) for x in w]
        else:
            u = [x + decay * y for x, y in zip(u, w, strict=True)]
        ratio = 1.0
        if decay != 0 or options["trust_ratio"] == "all":
            of_w, of_u = norm(w), norm(u)
            if options["max_weight_norm"] is not None:
                of_w = min(of_w, options["max_weight_norm"])
            ratio = of_w / of_u if of_w and of_u else 1.0
        return [x - lr * ratio * y for x, y in zip(w, u, strict=True)]


def parameters(dtype=torch.float64, shapes=SHAPES):
    return [nn.Parameter(torch.randn(shape, dtype=torch.float64).to(dtype)) for shape in shapes]


def flat(tensor):
    return tensor.detach().double().flatten().tolist()


def compare(groups, steps=3, tolerance=1e-12):
    """Take the same steps with LAMB and the oracle; a missing gradient now and then."""
    optimizer = mkor.LAMB([{"params": p, **o} for p, o in groups], **DEFAULTS)
    oracle = Oracle([([flat(p) for p in params], options) for params, options in groups])
    for number in range(steps):
        for i, p in enumerate(p for params, _ in groups for p in params):
            p.grad = None if (number, i) == (1, 1) else torch.randn_like(p)
        kept = [p.grad.clone() for params, _ in groups for p in params if p.grad is not None]
        gradients = [
            [None if p.grad is None else flat(p.grad) for p in params] for params, _ in groups
        ]
        optimizer.step()
        oracle.step(gradients)
        left = [p.grad for params, _ in groups for p in params if p.grad is not None]
        assert all(torch.equal(a, b) for a, b in zip(left, kept, strict=True))
    for (params, _), (expected, _, state) in zip(groups, oracle.groups, strict=True):
        for p, values, (m, v, count) in zip(params, expected, state, strict=True):
            assert flat(p) == pytest.approx(values, rel=tolerance, abs=tolerance)
            own = optimizer.state[p]
            assert flat(own["exp_avg"]) == pytest.approx(m, rel=tolerance, abs=tolerance)
            assert flat(own["exp_avg_sq"]) == pytest.approx(v, rel=tolerance, abs=tolerance)
            assert own["step"].item() == count
    return optimizer


@pytest.mark.parametrize("options", COMBINATIONS, ids=lambda o: "-".join(map(str, o.values())))
def test_every_combination_of_options(options):
    compare([(parameters(), options)])


@pytest.mark.parametrize("options", COMBINATIONS[::7], ids=lambda o: "-".join(map(str, o.values())))
def test_float32_agrees_to_rounding(options):
    compare([(parameters(torch.float32), options)], tolerance=1e-5)


def test_the_defaults_are_those_of_the_fused_reference():
    group = mkor.LAMB(parameters()).param_groups[0]
    expected = {**DEFAULTS, "lr": 1e-3}
    assert {key: value for key, value in group.items() if key != "params"} == expected


@given(
    lr=st.floats(0, 1),
    betas=st.tuples(*[st.sampled_from([0.0, 0.5, 0.9, 0.9999])] * 2),
    eps=st.sampled_from([1e-12, 1e-6, 0.1]),
    weight_decay=st.sampled_from([0.0, 1e-3, 1.0]),
    scale=st.sampled_from([1e-8, 1.0, 1e8]),
    options=st.sampled_from(COMBINATIONS),
)
def test_numbers_of_any_size(lr, betas, eps, weight_decay, scale, options):
    params = parameters()
    with torch.no_grad():
        for p in params:
            p.mul_(scale)
    own = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
    compare([(params, {**options, **own})], tolerance=1e-9 * max(scale, 1))


def test_the_norm_is_that_of_all_groups_and_each_has_its_own_limit():
    compare(
        [
            (parameters(), {"max_grad_norm": 0.5}),
            (parameters(), {"max_grad_norm": None, "weight_decay": 0.0}),
            (parameters(), {"max_grad_norm": 2.0, "lr": 0.5, "betas": (0.5, 0.9)}),
        ]
    )


def test_mixed_dtypes_in_one_group_agree_with_the_oracle():
    params = [p for d in (torch.float64, torch.float32) for p in parameters(d)]
    compare([(params, {}), (parameters(torch.float32), {"weight_decay": 0.0})], tolerance=1e-5)


@pytest.mark.parametrize("size", [1, 5, 2**22])
def test_batches_of_any_size_give_the_same_bits(size, monkeypatch):
    monkeypatch.setattr(batches, "BATCH_ELEMENTS", size)
    torch.manual_seed(3)
    params = parameters(torch.float32)
    compare([(params, {})], tolerance=1e-5)
    monkeypatch.undo()
    torch.manual_seed(3)
    expected = parameters(torch.float32)
    compare([(expected, {})], tolerance=1e-5)
    assert all(map(torch.equal, params, expected))


def test_batches_hold_one_device_and_dtype_and_not_too_much(monkeypatch):
    monkeypatch.setattr(batches, "BATCH_ELEMENTS", 6)
    devices = ["cpu", "meta", "cpu", "cpu", "cpu", "cpu", "meta"]
    sizes = [4, 3, 2, 1, 9, 1, 3]
    tensors = [torch.empty(n, device=d) for n, d in zip(sizes, devices, strict=True)]
    tensors.append(torch.empty(1, dtype=torch.float64))
    parts = batches.batches(tensors)
    assert [[t.numel() for t in part] for part in parts] == [[4, 2], [1], [9], [1], [3, 3], [1]]
    for part in parts:
        assert len({(t.device, t.dtype) for t in part}) == 1


def test_parameters_on_two_devices():
    here, there = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(4, device="meta"))
    optimizer = mkor.LAMB([here, there], max_grad_norm=None)
    for p in (here, there):
        p.grad = torch.ones_like(p)
    optimizer.step()
    assert {t.device.type for t in optimizer.state[there].values()} == {"meta"}
    assert here.detach().tolist() == pytest.approx([1 - 1e-3] * 3, rel=1e-6)


def test_the_bias_correction_keeps_its_digits_in_float32():
    steps = torch.tensor([1.0, 2.0, 1000.0, 1e6])
    for beta in (0.0, 0.9, 0.999, 0.99999):
        expected = [1 - beta ** int(t) for t in steps.tolist()]
        assert lamb.missing(beta, steps).tolist() == pytest.approx(expected, rel=3e-7)


@pytest.mark.parametrize("zero", ["weights", "gradients", "both"])
@pytest.mark.parametrize("trust_ratio", ["decayed", "all"])
def test_zeros_give_the_ratio_one(zero, trust_ratio):
    p = nn.Parameter(torch.zeros(3) if zero != "gradients" else torch.ones(3))
    p.grad = torch.zeros(3) if zero != "weights" else torch.full((3,), 0.1)
    decay = 0.0 if trust_ratio == "all" else 0.5
    mkor.LAMB([p], lr=0.1, weight_decay=decay, trust_ratio=trust_ratio).step()
    # Adam's first step is of size lr; a step from decay alone has the norm of the weights.
    moved = {"weights": -0.1, "gradients": 1.0 if decay == 0 else 0.9, "both": 0.0}[zero]
    assert p.detach().tolist() == pytest.approx([moved] * 3, rel=1e-4)


def test_a_relative_step_is_as_long_as_the_learning_rate_says():
    p = nn.Parameter(torch.randn(20, 30) * 7)
    before = p.detach().clone()
    p.grad = torch.randn(20, 30) * 1e-4
    mkor.LAMB([p], lr=0.01).step()
    assert (torch.dist(p, before) / before.norm()).item() == pytest.approx(0.01, rel=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_parameters_are_updated_in_float32(dtype):
    params = parameters(dtype)
    twins = [nn.Parameter(p.detach().float()) for p in params]
    halves, wides = mkor.LAMB(params, lr=0.1), mkor.LAMB(twins, lr=0.1)
    for _ in range(3):
        for p, twin in zip(params, twins, strict=True):
            p.grad = torch.randn_like(p)
            twin.grad = p.grad.float()
        halves.step()
        wides.step()
        for p, twin in zip(params, twins, strict=True):
            assert torch.equal(p, twin.to(dtype))
            assert halves.state[p]["exp_avg"].dtype == torch.float32
            assert torch.equal(halves.state[p]["exp_avg_sq"], wides.state[twin]["exp_avg_sq"])
            twin.data.copy_(p)


def test_complex_parameters_are_pairs_of_real_ones():
    p = nn.Parameter(torch.randn(3, 2, dtype=torch.complex64))
    twin = nn.Parameter(torch.view_as_real(p.detach()).clone())
    optimizer, expected = mkor.LAMB([p], lr=0.1), mkor.LAMB([twin], lr=0.1)
    for _ in range(3):
        p.grad = torch.randn_like(p)
        twin.grad = torch.view_as_real(p.grad).clone()
        optimizer.step()
        expected.step()
    assert torch.equal(torch.view_as_real(p.detach()), twin.detach())
    assert optimizer.state[p]["exp_avg"].dtype == torch.complex64


def test_layouts_of_memory_do_not_matter():
    p = nn.Parameter(torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last))
    twin = nn.Parameter(p.detach().contiguous())
    for _ in range(2):
        twin.grad = torch.randn(2, 3, 4, 5)
        p.grad = twin.grad.transpose(2, 3).contiguous().transpose(2, 3)
        mkor.LAMB([p], lr=0.1).step()
        mkor.LAMB([twin], lr=0.1).step()
    torch.testing.assert_close(p, twin)


def test_an_empty_parameter_and_none_at_all():
    p, other = nn.Parameter(torch.empty(0, 3)), nn.Parameter(torch.ones(2))
    optimizer = mkor.LAMB([p, other])
    optimizer.step()
    assert not optimizer.state
    p.grad, other.grad = torch.empty(0, 3), torch.ones(2)
    optimizer.step()
    assert torch.isfinite(other).all() and (other < 1).all()


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("max_grad_norm", [None, 1.0])
def test_gradients_that_are_not_finite(bad, max_grad_norm):
    p, other = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
    p.grad, other.grad = torch.tensor([1.0, bad, 1.0]), torch.ones(3)
    mkor.LAMB([p, other], lr=0.1, max_grad_norm=max_grad_norm).step()
    assert p.isnan().any() and other.isfinite().all()


SPARSE = re.escape(
    "the gradient of a parameter of shape (4, 2) is sparse; LAMB takes dense ones only, as every "
    "weight takes part in the norms of a step. Give the parameter to torch.optim.SparseAdam, or "
    "build its layer with sparse=False"
)


def test_sparse_gradients_are_refused_before_anything_changes():
    dense, table = nn.Linear(2, 2), nn.Embedding(4, 2, sparse=True)
    groups = [{"params": dense.parameters()}, {"params": table.parameters()}]
    optimizer = mkor.LAMB(groups)
    before = [p.detach().clone() for p in [*dense.parameters(), *table.parameters()]]
    dense(table(torch.tensor([1, 2]))).sum().backward()
    with pytest.raises(RuntimeError, match=SPARSE):
        optimizer.step()
    assert not optimizer.state
    assert all(map(torch.equal, [*dense.parameters(), *table.parameters()], before))


NO_LIMIT = "must be positive and finite, or None for no limit"
WRONG = [
    *[("lr", v, "must be a finite number of at least 0") for v in (-1, math.nan, "1", True, None)],
    ("lr", torch.ones(2), "must be a finite number of at least 0, or a tensor with one"),
    ("lr", torch.tensor(-1.0), "must be a finite number of at least 0, or a tensor with one"),
    *[
        ("betas", v, "must be two numbers of at least 0 and below 1")
        for v in (0.9, (0.9,), (0.9, 1.0), (-0.1, 0.9), ("0.9", 0.9), None)
    ],
    *[("eps", v, "must be finite and at least 0") for v in (-1e-9, math.inf, None)],
    *[("weight_decay", v, "must be finite and at least 0") for v in (-1, math.nan, "0")],
    *[("max_grad_norm", v, NO_LIMIT) for v in (0, -1.0, math.inf, False)],
    *[("max_weight_norm", v, NO_LIMIT) for v in (0, "10")],
    ("trust_ratio", "al", "choose from 'decayed', 'all'; did you mean 'all'?"),
    ("trust_ratio", None, "choose from 'decayed', 'all'"),
    ("weight_decay_mode", "decoupld", "did you mean 'decoupled'?"),
    ("bias_correction", "no", "choose from True, False"),
    ("maximize", None, "choose from True, False"),
]


@pytest.mark.parametrize(("name", "value", "message"), WRONG)
def test_an_option_out_of_range(name, value, message):
    params = parameters()
    told = re.escape(f"{name}={value!r} is ") + ".*" + re.escape(message)
    with pytest.raises(ValueError, match=told):
        mkor.LAMB(params, **{name: value})
    with pytest.raises(ValueError, match=told):
        mkor.LAMB([{"params": params, name: value}])
    optimizer = mkor.LAMB(params[:1])
    with pytest.raises(ValueError, match=told):
        optimizer.add_param_group({"params": params[1:], name: value})
    assert len(optimizer.param_groups) == 1
