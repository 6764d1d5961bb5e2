"""The residual network for small images of He et al. (2016): three stages of basic blocks."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn.functional import avg_pool2d, pad


class BasicBlock(nn.Module):
    """Two convolutions with batch norm around a shortcut without parameters ("option A").

    Args:
        before: Channels of the input.
        after: Channels of the output.
        stride: Of the first convolution.
    """

    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.stride = stride
        self.added = after - before
        self.body = nn.Sequential(
            nn.Conv2d(before, after, 3, stride=stride, padding=1, bias=False),
            nn.BatchNorm2d(after),
            nn.ReLU(),
            nn.Conv2d(after, after, 3, padding=1, bias=False),
            nn.BatchNorm2d(after),
        )

    def forward(self, x: Tensor) -> Tensor:
        """Transforms [rows, before, h, w] to [rows, after, h / stride, w / stride]."""
        shortcut = x[:, :, :: self.stride, :: self.stride]
        half = self.added // 2
        shortcut = pad(shortcut, (0, 0, 0, 0, half, self.added - half))
        return (self.body(x) + shortcut).relu()


class ResNet(nn.Module):
    """A convolution, three stages of blocks, the mean over the image, a linear layer.

    Args:
        classes: How many.
        blocks: In each stage; 3 make ResNet-20.
        width: Channels of the first stage, doubled in each of the next two.
    """

    def __init__(self, classes: int, blocks: int = 3, width: int = 16) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU()
        )
        stages: list[nn.Module] = []
        before = width
        for stage in range(3):
            for block in range(blocks):
                stride = 2 if stage and not block else 1
                stages.append(BasicBlock(before, width << stage, stride))
                before = width << stage
        self.stages = nn.Sequential(*stages)
        self.head = nn.Linear(before, classes)

    def forward(self, images: Tensor) -> Tensor:
        """Returns logits [rows, classes] for images [rows, 3, height, width]."""
        features = self.stages(self.stem(images))
        return self.head(avg_pool2d(features, features.shape[-1]).flatten(1))
