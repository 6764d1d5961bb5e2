"""What SNGD loses on a convolution by the rank-1 part of a sample's gradient, and what it saves.

    python benchmarks/per_sample.py

A sample's gradient is a sum over positions, G_i = Σ_t g_it a_itᵀ. SNGD keeps one row a sample, the
sum of its g and its mean patch, whose product is that sum's rank-1 part. The natural gradient is
solved densely in float64 with both, on images of white noise and on smoothed ones. The memory is
that of the rows that a method must hold between updates.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from statistics import median

import torch
import torch.nn.functional as F
from record import save
from torch import Tensor

SAMPLES, CHANNELS, OUTPUTS, KERNEL, SIDE = 32, 8, 16, 3, 12
DAMPINGS = (1.0, 0.1, 0.01)
LAYERS = {
    "ResNet-20, a 64x64x3x3 convolution, batch 128": (128, 64, 576),
    "ResNet-50, a 512x512x3x3 convolution, batch 256": (256, 512, 4608),
    "BERT-base, a 3072x768 linear layer, 32 sequences as samples": (32, 3072, 768),
}


def gradients(smooth: bool) -> tuple[Tensor, Tensor]:
    """Gradients of the samples of a batch by a kernel, [n, o·i]: exact, and their rank-1 part."""
    images = torch.randn(SAMPLES, CHANNELS, SIDE, SIDE, dtype=torch.float64)
    targets = torch.randn(SAMPLES, OUTPUTS, SIDE, SIDE, dtype=torch.float64)
    if smooth:
        images = 3 * F.avg_pool2d(images, 5, 1, 2) + 0.5
        targets = 3 * F.avg_pool2d(targets, 5, 1, 2)
    kernel = torch.randn(OUTPUTS, CHANNELS, KERNEL, KERNEL, dtype=torch.float64)
    kernel /= (CHANNELS * KERNEL**2) ** 0.5
    outputs = F.conv2d(images, kernel, padding=KERNEL // 2)
    g = (outputs - targets).flatten(2).mT / targets[0].numel()  # [n, t, o]
    a = F.unfold(images, KERNEL, padding=KERNEL // 2).mT  # [n, t, i]
    exact = (g.mT @ a).flatten(1)
    part = (g.sum(dim=1)[:, :, None] * a.mean(dim=1)[:, None]).flatten(1)
    return exact, part


def natural(rows: Tensor, gradient: Tensor, damping: float) -> Tensor:
    """(F + μI)⁻¹∇ with F the mean outer product of the rows."""
    kernel = rows @ rows.mT / SAMPLES
    kernel.diagonal().add_(damping)
    return (gradient - rows.mT @ torch.linalg.solve(kernel, rows @ gradient) / SAMPLES) / damping


def measured(smooth: bool, damping: float, draws: int = 50) -> dict[str, float]:
    """Medians over draws; the damping is relative to the trace of the exact Fisher matrix."""
    errors, cosines = [], []
    for _ in range(draws):
        exact, part = gradients(smooth)
        mean = exact.mean(dim=0)
        level = damping * float(exact.square().sum()) / SAMPLES
        right = natural(exact, mean, level)
        wrong = natural(part, mean, level)
        errors.append(float((wrong - right).norm() / right.norm()))
        cosines.append(float(F.cosine_similarity(wrong, right, dim=0)))
    return {"error": round(median(errors), 3), "cosine": round(median(cosines), 3)}


def main() -> None:
    """Measure, print, store."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results/per_sample.json"))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    solves = {
        f"{'smooth' if smooth else 'white'} {damping}": measured(smooth, damping)
        for smooth in (False, True)
        for damping in DAMPINGS
    }
    memory = {
        name: {"rank 1, MiB": n * (o + i) / 2**18, "exact, MiB": n * o * i / 2**18}
        for name, (n, o, i) in LAYERS.items()
    }
    for name, row in {**solves, **memory}.items():
        print(f"{name:<62} {row}")
    save(arguments.output, {"natural gradients": solves, "rows": memory})


if __name__ == "__main__":
    main()
