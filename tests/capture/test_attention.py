"""`nn.MultiheadAttention`: its projections against an attention written out in float64."""

import pytest
import torch
from torch import nn

from layer_oracles import Observed, backward

CLOSE = {"rtol": 1e-9, "atol": 1e-12}
WIDTH, HEADS = 4, 2


def projection(module, part, source):
    """Weight and bias of one input projection."""
    packed = module.in_proj_weight
    weight = getattr(module, f"{part}_proj_weight") if packed is None else packed.chunk(3)[source]
    bias = None if module.in_proj_bias is None else module.in_proj_bias.chunk(3)[source]
    return weight.detach(), None if bias is None else bias.detach()


def attention_by_hand(module, query, key, value, ignored=None):
    """Rows and projections of an attention on [L, n, E] tensors; the projections keep gradients."""
    kept = {}
    for source, (part, rows) in enumerate((("q", query), ("k", key), ("v", value))):
        weight, bias = projection(module, part, source)
        projected = rows.detach() @ weight.T
        kept[part] = (projected if bias is None else projected + bias).requires_grad_()

    def heads(tensor):  # [n, h, L, E/h]
        length, samples, _ = tensor.shape
        return tensor.view(length, samples, HEADS, -1).permute(1, 2, 0, 3)

    q, k, v = (heads(kept[part]) for part in "qkv")
    scores = q @ k.mT / (WIDTH // HEADS) ** 0.5
    if ignored is not None:
        scores = scores.masked_fill(ignored[:, None, None, :], float("-inf"))
    mixed = (scores.softmax(dim=-1) @ v).permute(2, 0, 1, 3).flatten(2)  # [L, n, E]
    weight, bias = module.out_proj.weight.detach(), module.out_proj.bias
    output = mixed @ weight.T
    return kept, mixed.detach(), output if bias is None else output + bias.detach()


def attend(blocks=1, *, bias, batch_first, cross, sizes=None, masked=False, frozen=()):
    """Run module and oracle on the same inputs and the same random loss."""
    samples, length = 3, 5
    other = 6 if cross else length
    module = nn.MultiheadAttention(
        WIDTH, HEADS, bias=bias, batch_first=batch_first, **(sizes or {})
    ).double()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn_like(parameter))
    for name in frozen:
        module.get_parameter(name).requires_grad_(False)
    query = torch.randn(length, samples, WIDTH, dtype=torch.float64)
    key = torch.randn(other, samples, module.kdim, dtype=torch.float64) if cross else query
    value = torch.randn(other, samples, module.vdim, dtype=torch.float64) if cross else query
    ignored = None
    if masked:
        ignored = torch.zeros(samples, other, dtype=torch.bool)
        ignored[0, -1] = ignored[2, 1] = True
    observed = Observed(module, blocks)
    given = [t.transpose(0, 1) if batch_first else t for t in (query, key, value)]
    output, _ = module(*given, key_padding_mask=ignored)
    kept, mixed, expected = attention_by_hand(module, query, key, value, ignored)
    ordered = output.transpose(0, 1) if batch_first else output
    torch.testing.assert_close(ordered, expected, **CLOSE)
    grad_output = backward(output)
    grad_output = grad_output.transpose(0, 1) if batch_first else grad_output
    expected.backward(grad_output)
    return module, observed, (query, key, value), kept, mixed, grad_output


def rows_of(tensor):
    return tensor.detach().flatten(0, 1)


def assert_mean(actual, rows):
    torch.testing.assert_close(actual, rows.mean(dim=0), **CLOSE)


MODES = [
    {"batch_first": batch_first, "cross": cross, "masked": masked}
    for batch_first in (True, False)
    for cross in (True, False)
    for masked in (True, False)
]


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_packed_input_projection(mode):
    module, observed, sources, kept, _, _ = attend(bias=True, **mode)
    assert list(observed.layers) == ["in_proj", "out_proj"] or len(observed.layers) == 2
    name = next(name for name in observed.layers if name.endswith("in_proj"))
    seen, view = observed.seen(name), observed.view(name)
    assert seen.inputs.shape == (3, 1, WIDTH + 1)
    matrix = view.matrix()
    for g, (part, source) in enumerate(zip("qkv", sources, strict=True)):
        inputs, grads = rows_of(source), kept[part].grad.flatten(0, 1)
        assert_mean(seen.inputs[g, 0, :-1] / seen.rows[0], inputs)
        assert float(seen.inputs[g, 0, -1]) == float(seen.rows[0])
        torch.testing.assert_close(seen.grads[g, 0], grads.sum(dim=0), **CLOSE)
        torch.testing.assert_close(matrix[g, :, :-1], grads.T @ inputs, **CLOSE)
        torch.testing.assert_close(matrix[g, :, -1], grads.sum(dim=0), **CLOSE)
    assert module.in_proj_weight.grad is not None


@pytest.mark.parametrize("mode", [mode for mode in MODES if mode["cross"]], ids=str)
def test_separate_input_projections(mode):
    _, observed, sources, kept, _, _ = attend(bias=True, sizes={"kdim": 3, "vdim": 5}, **mode)
    assert len(observed.layers) == 4
    for part, source in zip("qkv", sources, strict=True):
        name = next(name for name in observed.layers if name.endswith(f"{part}_proj"))
        seen, view = observed.seen(name), observed.view(name)
        inputs, grads = rows_of(source), kept[part].grad.flatten(0, 1)
        assert int(seen.rows[0]) == len(inputs)
        assert_mean(seen.inputs[0, 0, :-1] / seen.rows[0], inputs)
        assert seen.grads_reduced
        torch.testing.assert_close(seen.grads[0, 0], grads.sum(dim=0), **CLOSE)
        expected = torch.cat([grads.T @ inputs, grads.sum(dim=0)[:, None]], dim=1)
        torch.testing.assert_close(view.matrix()[0], expected, **CLOSE)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("mode", MODES, ids=str)
def test_output_projection(mode, bias):
    _, observed, _, _, mixed, grad_output = attend(bias=bias, **mode)
    name = next(name for name in observed.layers if name.endswith("out_proj"))
    seen, view = observed.seen(name), observed.view(name)
    inputs, grads = rows_of(mixed), rows_of(grad_output)
    assert int(seen.rows[0]) == len(inputs)
    assert_mean(seen.inputs[0, 0, :WIDTH] / seen.rows[0], inputs)
    assert seen.grads_reduced is bias
    torch.testing.assert_close(seen.grads[0, 0], grads.sum(dim=0), **CLOSE)
    expected = grads.T @ inputs
    if bias:
        expected = torch.cat([expected, grads.sum(dim=0)[:, None]], dim=1)
    torch.testing.assert_close(view.matrix()[0], expected, **CLOSE)


def test_an_input_projection_without_bias_is_left_to_the_base_optimizer():
    _, observed, *_ = attend(bias=False, batch_first=True, cross=False)
    assert len(observed.layers) == 1
    assert [(out.kind, "bias" in out.reason) for out in observed.left] == [
        ("MultiheadAttention.in_proj", True)
    ]


@pytest.mark.parametrize("blocks", [2, 4])
@pytest.mark.parametrize("mode", MODES, ids=str)
def test_input_projection_blocks_cover_the_rows_once(mode, blocks):
    _, observed, sources, kept, _, _ = attend(blocks, bias=True, **mode)
    name = next(name for name in observed.layers if name.endswith("in_proj"))
    seen = observed.seen(name)
    order = 0 if mode["batch_first"] else None
    for g, (part, source) in enumerate(zip("qkv", sources, strict=True)):
        rows = source.transpose(0, 1) if order == 0 else source
        rows = rows.flatten(0, 1)
        total = seen.inputs[g, :, :-1].sum(dim=0) / seen.rows.sum()
        if not mode["cross"]:
            assert_mean(total, rows)
            parts = rows.split([int(count) for count in seen.rows])
            for j, chosen in enumerate(parts):
                assert_mean(seen.inputs[g, j, :-1] / seen.rows[j], chosen)
        torch.testing.assert_close(seen.grads[g, 0], kept[part].grad.sum(dim=(0, 1)), **CLOSE)


@pytest.mark.parametrize("blocks", [2, 4])
@pytest.mark.parametrize("mode", MODES, ids=str)
def test_output_projection_blocks_are_the_same_rows_on_both_sides(mode, blocks):
    """Blocks of the first dimension of the output, as it is given to the user."""
    _, observed, _, _, mixed, grad_output = attend(blocks, bias=False, **mode)
    seen = observed.seen(next(iter(observed.layers)))
    inputs, grads = (t.transpose(0, 1) if mode["batch_first"] else t for t in (mixed, grad_output))
    per_sample = inputs.shape[1]
    parts = torch.arange(len(inputs)).split([int(count) // per_sample for count in seen.rows])
    assert int(seen.rows.sum()) == inputs[..., 0].numel()
    for j, part in enumerate(parts):
        torch.testing.assert_close(seen.inputs[0, j], inputs[part].sum(dim=(0, 1)), **CLOSE)
        torch.testing.assert_close(seen.grads[0, j], grads[part].sum(dim=(0, 1)), **CLOSE)


def test_attention_weights_and_keyword_arguments_change_nothing():
    module = nn.MultiheadAttention(WIDTH, HEADS).double()
    x = torch.randn(5, 3, WIDTH, dtype=torch.float64)
    results = []
    for weights, named in ((True, False), (False, False), (False, True)):
        observed = Observed(module)
        module.zero_grad()
        arguments = {"query": x, "key": x, "value": x} if named else {}
        output, _ = module(*(() if named else (x, x, x)), **arguments, need_weights=weights)
        output.sum().backward()
        results.append([observed.seen(name) for name in observed.layers])
        observed.capture.remove()
    for other in results[1:]:
        for one, two in zip(results[0], other, strict=True):
            torch.testing.assert_close(one.inputs, two.inputs, **CLOSE)
            torch.testing.assert_close(one.grads, two.grads, **CLOSE)


def test_attention_without_batch_dimension():
    module = nn.MultiheadAttention(WIDTH, HEADS).double()
    observed = Observed(module)
    x = torch.randn(5, WIDTH, dtype=torch.float64)
    output, _ = module(x, x, x)
    _, mixed, expected = attention_by_hand(module, *(x[:, None],) * 3)
    torch.testing.assert_close(output, expected[:, 0], **CLOSE)
    output.sum().backward()
    seen = observed.seen(next(name for name in observed.layers if name.endswith("out_proj")))
    torch.testing.assert_close(seen.inputs[0, 0, :-1], mixed.sum(dim=(0, 1)), **CLOSE)
