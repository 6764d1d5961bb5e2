"""torch.compile with inductor, whose kernels give eager numbers to rounding (A15, A16)."""

import shutil

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from cases.helpers import assert_same, build, factors, nothing_seen, parameters, updates
from cases.test_compile import fresh_dynamo, traced

assert fresh_dynamo  # a fixture

pytestmark = [
    pytest.mark.skipif(
        shutil.which("g++") is None, reason="inductor needs a C++ compiler and finds no g++"
    ),
    # torch on itself, where inductor imports torch.jit.
    pytest.mark.filterwarnings("ignore:.*torch.jit.*is deprecated:DeprecationWarning"),
]

WIDTH, TOKENS = 8, 5
STEPS, EVERY = 7, 3  # updates fall in steps 0, 3 and 6
SECOND = 3


class Attention(nn.Module):
    """One head of causal attention without biases, behind a convolution with one."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Conv1d(3, WIDTH, 1)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, 2, bias=False)

    def forward(self, x):
        q, k, v = self.qkv(self.embed(x).mT).chunk(3, dim=-1)
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True))


def run(method, wrap, dtype):
    """Parameters and factors in the end, and the number of graphs after each step."""
    torch.manual_seed(1)
    model = Attention()
    optimizer = build(method, model, warmup_steps=1, factor_update_steps=EVERY)
    fast = wrap(model)
    graphs = []
    for _ in range(STEPS):
        x = torch.randn(4, 3, TOKENS)
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype is torch.bfloat16):
            loss = fast(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    assert set(updates(optimizer).values()) == {3}
    return parameters(model), factors(optimizer), graphs


@traced
@pytest.mark.parametrize(
    ("method", "dtype", "tolerance"),
    [("lowrank-sketch", torch.float32, 1e-4), ("exact", torch.bfloat16, 1e-2)],
)
def test_inductor_computes_the_same_and_settles(method, dtype, tolerance, fresh_dynamo):
    def inductor(model):
        return torch.compile(model, backend="inductor", fullgraph=True)

    expected, seen, _ = run(method, lambda model: model, dtype)
    found, own, graphs = run(method, inductor, dtype)
    assert_same(found, expected, tolerance)
    if method == "exact":  # eigenvectors that hardly matter turn freely
        assert_same(own, seen, tolerance)
    assert graphs[0] == 1 and set(graphs[SECOND - 1 :]) == {2}
    assert not fresh_dynamo["graph_break"]


@traced
def test_signs_are_operators_that_a_compiler_does_not_look_into(fresh_dynamo):
    """Inlined, the hashes took inductor half a minute for two layers."""
    found = []

    def look(graph, _):
        for part in graph.modules():
            if isinstance(part, torch.fx.GraphModule):
                found.extend(str(node.target) for node in part.graph.nodes)
        return graph

    model = nn.Sequential(nn.Linear(3, 2))
    optimizer = build("lowrank-sketch", model, warmup_steps=1)
    torch.compile(model, backend=look)(torch.randn(4, 3)).sum().backward()
    assert any("mkor.signs" in target for target in found)
    assert not nothing_seen(optimizer)
    assert not any("xor" in target for target in found), found
