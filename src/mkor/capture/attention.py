"""`nn.MultiheadAttention`: its input projection as three matrices, its output projection as one.

The module multiplies by its weights inside one function, so no submodule is called and no hook
sees the output projection's input. While a call is observed, a dispatch mode remembers the operand
of the last matrix product, which is that input. The input projection's gradient side is its bias
gradient; without a bias it can't be seen and the projection is left to the base optimizer.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from mkor.capture.views import BlockSums, LinearView, View, block_sums, sizes
from mkor.methods.base import LayerShape

_OPERAND = {torch.ops.aten.addmm.default: 1, torch.ops.aten.mm.default: 0}


class LastProduct(TorchDispatchMode):
    """Remembers the left operand of the last matrix product."""

    def __init__(self) -> None:
        """Nothing seen yet."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.operand: Tensor | None = None

    def start(self) -> None:
        """Begin to listen."""
        self.__enter__()  # type: ignore[no-untyped-call]

    def stop(self) -> Tensor | None:
        """Stop listening; the last operand."""
        self.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        return self.operand

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation; keep the operand of a product until the next one.

        What another optimizer computes of the same call, it computes without gradients.
        """
        if func in _OPERAND and torch.is_grad_enabled():
            self.operand = args[_OPERAND[func]]
        return func(*args, **(kwargs or {}))


def output_order(operand: Tensor, output: Tensor, module: nn.Module) -> Tensor:
    """The output projection's input, [L·n, E], in the order of the module's output."""
    if output.dim() == 3 and module.batch_first:
        return operand.reshape(output.shape[1], output.shape[0], -1).transpose(0, 1)
    return operand.reshape(*output.shape[:-1], -1)


class AttentionInputView(LinearView):
    """An input projection: the packed weight as three blocks, or one separate weight."""

    sources: tuple[int, ...] = (0, 1, 2)

    def output_sums(self, grad: Tensor, inputs: torch.Size, blocks: int) -> Tensor:
        """Not used: the projection's own output is inside the attention."""
        raise NotImplementedError

    def input_sums(self, inputs: Tensor, blocks: int) -> BlockSums:
        """Block sums of one source's rows, [1, r, i], and rows per block."""
        rows = inputs.flatten(0, -2)
        counts = sizes(rows.shape[0], blocks)
        return block_sums(rows, counts)[None], counts

    def call_sums(self, tensors: list[Tensor], blocks: int) -> BlockSums:
        """Block sums of query, key and value rows, [G, r, i], and the rows of the first.

        The others are scaled to its number of rows, so that each keeps its own mean.
        """
        sums: list[Tensor] = []
        counts: list[int] = []
        for tensor in tensors:
            part, own = self.input_sums(tensor, blocks)
            counts = counts or own
            if own != counts:
                scales = [count / max(there, 1) for count, there in zip(counts, own, strict=True)]
                rows = [row * scale for row, scale in zip(part[0], scales, strict=True)]
                part = torch.stack(rows)[None]
            sums.append(part)
        return torch.cat(sums), counts


def computed_parts(module: nn.MultiheadAttention) -> list[str]:
    """Projections whose weight is computed (pruned, parametrised), not a parameter."""
    packed = module._qkv_same_embed_dim
    parts = ["in_proj"] if packed else ["q_proj", "k_proj", "v_proj"]
    computed = [part for part in parts if module._parameters.get(f"{part}_weight") is None]
    missing = module.out_proj._parameters.get("weight") is None
    return [*computed, "out_proj"] if missing else computed


def attention_views(name: str, module: nn.MultiheadAttention) -> list[View]:
    """The views of one attention module: input projection(s), then output projection."""
    computed = computed_parts(module)
    width, out = module.embed_dim, module.out_proj
    bias = "in_proj_bias" if module._parameters.get("in_proj_bias") is not None else None
    views: list[View] = []
    if module._qkv_same_embed_dim and "in_proj" not in computed:
        shape = LayerShape(3, width, width + (bias is not None))
        views.append(input_view(name, module, "in_proj", bias, shape, (0, 3 * width)))
    elif not module._qkv_same_embed_dim:
        for source, part in enumerate(("q_proj", "k_proj", "v_proj")):
            if part in computed:
                continue
            inputs = getattr(module, f"{part}_weight").shape[1]
            shape = LayerShape(1, width, inputs + (bias is not None))
            rows = (source * width, (source + 1) * width)
            view = input_view(name, module, part, bias, shape, rows)
            view.sources = (source,)
            views.append(view)
    if "out_proj" in computed:
        return views
    out_bias = "bias" if out._parameters.get("bias") is not None else None
    shape = LayerShape(1, width, width + (out_bias is not None))
    label, kind = f"{name}.out_proj", "MultiheadAttention.out_proj"
    return [*views, LinearView(label, kind, module, out, "weight", out_bias, shape)]


def input_view(
    name: str,
    module: nn.MultiheadAttention,
    part: str,
    bias: str | None,
    shape: LayerShape,
    rows: tuple[int, int],
) -> AttentionInputView:
    """The view of one input projection."""
    label, kind = f"{name}.{part}", f"MultiheadAttention.{part}"
    return AttentionInputView(label, kind, module, module, f"{part}_weight", bias, shape, rows)
