"""The three workloads that step time and memory are measured on.

(a) an MLP 784-1024-1024-10 at batch 256; (b) two BERT-base encoder layers (768/3072) on 8 sequences
of 128 tokens; (c) a ResNet-20 for CIFAR at batch 128. Data are random: time doesn't depend on them.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Workload = tuple[nn.Module, Callable[[], Tensor]]


class Block(nn.Module):
    """A basic residual block."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(outputs)
        same = inputs == outputs and stride == 1
        self.shortcut = nn.Identity() if same else nn.Conv2d(inputs, outputs, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Images [n, C, H, W]."""
        out = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(out)) + self.shortcut(x))


def mlp() -> Workload:
    """Workload (a)."""
    model = nn.Sequential(
        nn.Linear(784, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 10)
    )
    x, y = torch.randn(256, 784), torch.randint(0, 10, (256,))
    return model, lambda: F.cross_entropy(model(x), y)


def encoder() -> Workload:
    """Workload (b)."""
    layers = [
        nn.TransformerEncoderLayer(768, 12, 3072, 0.0, activation="gelu", batch_first=True)
        for _ in range(2)
    ]
    model = nn.Sequential(*layers)
    x = torch.randn(8, 128, 768)
    return model, lambda: model(x).square().mean()


def resnet20() -> Workload:
    """Workload (c)."""
    blocks: list[nn.Module] = []
    inputs = 16
    for outputs, stride in [(16, 1)] * 3 + [(32, 2), (32, 1), (32, 1), (64, 2), (64, 1), (64, 1)]:
        blocks.append(Block(inputs, outputs, stride))
        inputs = outputs
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3, 1, 1, bias=False),
        nn.BatchNorm2d(16),
        nn.ReLU(inplace=True),
        *blocks,
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(64, 10),
    )
    x, y = torch.randn(128, 3, 32, 32), torch.randint(0, 10, (128,))
    return model, lambda: F.cross_entropy(model(x), y)


WORKLOADS: dict[str, tuple[str, Callable[[], Workload]]] = {
    "a": ("MLP 784-1024-1024-10, batch 256", mlp),
    "b": ("two BERT-base encoder layers, 8x128 tokens", encoder),
    "c": ("CIFAR ResNet-20, batch 128", resnet20),
}
