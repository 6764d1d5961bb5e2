"""Dense factors of which one triangle is kept: half the memory, the same numbers."""

import pytest
import torch
from torch import nn

import mkor
from method_driver import LayerShape, Seen, init, run_update
from mkor import triangle
from mkor.methods.mkor import MKORMethod

RULES = ("exact", "paper", "reference")
SHAPES = [LayerShape(2, 4, 7), LayerShape(1, 3, 5), LayerShape(3, 1, 2)]
SIDES = ("outputs", "inputs")


def method(packed, **options):
    usual = {"rule": "exact", "vectors": 1, "decay": 0.9, "damping": 0.1, "norm_limit": 2.0}
    rest = {"blend": 0.95, "max_dim": 64, "state_dtype": None, "on_nonfinite": "skip"}
    return MKORMethod(**{**usual, **rest, **options}, packed=packed)


def after(own, shape, updates=12):
    """The state after some updates, one of them not finite."""
    torch.manual_seed(0)
    state = init(own, shape)
    for step in range(updates):
        inputs = torch.randn(shape.stack, own.vectors, shape.inputs)
        grads = torch.randn(shape.stack, own.vectors, shape.outputs)
        if step == 5:
            inputs[0, 0, 0] = torch.nan
        rows = torch.full((own.vectors,), 4.0)
        state = run_update(
            own, state, Seen(inputs, grads, rows, torch.zeros(()), grads_reduced=False)
        )
    return state


@pytest.mark.parametrize("dtype", [None, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("rule", RULES)
def test_the_triangle_of_one_vector_updates_is_that_of_the_matrix(rule, shape, dtype):
    whole, half = (method(packed, rule=rule, state_dtype=dtype) for packed in (False, True))
    expected, found = after(whole, shape), after(half, shape)
    grad = torch.randn(shape.stack, shape.outputs, shape.inputs)
    for side in SIDES:
        length = expected[side].shape[-1]
        assert found[side].shape == (shape.stack, length * (length + 1) // 2)
        assert torch.equal(found[side], triangle.pack(expected[side]))
    assert torch.equal(found["events"], expected["events"]) and int(found["events"].sum()) > 0
    assert torch.equal(half.precondition(found, grad), whole.precondition(expected, grad))


@pytest.mark.parametrize("rule", RULES)
def test_the_triangle_of_several_vectors_differs_by_rounding(rule):
    shape = SHAPES[0]
    whole, half = (method(p, rule=rule, vectors=3, state_dtype=torch.float64) for p in (0, 1))
    expected, found = after(whole, shape), after(half, shape)
    for side in SIDES:
        matrix = triangle.unpack(found[side], expected[side].shape[-1])
        torch.testing.assert_close(matrix, expected[side], rtol=1e-10, atol=1e-12)


def test_a_reset_makes_the_identity():
    own = method(True, on_nonfinite="reset")
    state = after(own, SHAPES[0], updates=6)  # the last one is not finite
    matrix = triangle.unpack(state["inputs"], SHAPES[0].inputs)
    assert torch.equal(matrix[0], torch.eye(SHAPES[0].inputs))
    assert not torch.equal(matrix[1], torch.eye(SHAPES[0].inputs))


def test_wide_sides_keep_their_rows_beside_triangles():
    options = {"max_dim": 4, "wide_sides": "lowrank", "count": 3}
    whole, half = (method(packed, **options) for packed in (False, True))
    expected, found = after(whole, SHAPES[0]), after(half, SHAPES[0])
    grad = torch.randn(2, 4, 7)
    assert found["outputs"].shape == (2, 10) and found["inputs"].shape == (2, 3, 7)
    assert torch.equal(half.precondition(found, grad), whole.precondition(expected, grad))


@pytest.mark.parametrize(("dtype", "size"), [(None, 4), (torch.bfloat16, 2)])
def test_a_layer_keeps_half_of_its_bytes(dtype, size):
    model = nn.Linear(6, 3)
    base = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = mkor.MKOR(model, base, packed=True, state_dtype=dtype)
    (layer,) = optimizer.layers()
    events = method(True).init(LayerShape(1, 3, 7), torch.device("cpu"), torch.float32)["events"]
    counted = events.numel() * events.element_size()
    assert layer.bytes == size * (3 * 4 // 2 + 7 * 8 // 2) + counted
    estimated = mkor.estimate(model, mkor.MKOR, packed=True, state_dtype=dtype)
    assert estimated.layers[0].bytes == layer.bytes
