"""ResNet-50 as transformers has it, for photographs and for small images."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor, nn

from mkor_bench.models.bert import need_transformers


class Shape(NamedTuple):
    """How large a network of bottleneck blocks is.

    Attributes:
        depths: Blocks in each stage.
        widths: Channels of each stage.
        stem: Channels of the first convolution.
    """

    depths: tuple[int, ...]
    widths: tuple[int, ...]
    stem: int


RESNET50 = Shape((3, 4, 6, 3), (256, 512, 1024, 2048), 64)
TINY = Shape((1, 1), (16, 32), 8)
"""For quick looks."""


class ResNet50(nn.Module):
    """The network of He et al. (2016).

    Args:
        classes: How many.
        shape: How large.
        small: Whether images are of about 32 pixels: the first convolution is then 3 by 3 and
            keeps the size, and no pooling follows it.
    """

    def __init__(self, classes: int, shape: Shape = RESNET50, *, small: bool = False) -> None:
        super().__init__()
        from transformers import ResNetConfig, ResNetForImageClassification

        config = ResNetConfig(
            embedding_size=shape.stem,
            hidden_sizes=list(shape.widths),
            depths=list(shape.depths),
            num_labels=classes,
        )
        self.network: Any = ResNetForImageClassification(config)
        if small:
            stem = self.network.resnet.embedder
            first = nn.Conv2d(3, shape.stem, 3, padding=1, bias=False)
            nn.init.kaiming_normal_(first.weight, mode="fan_out", nonlinearity="relu")
            stem.embedder.convolution, stem.pooler = first, nn.Identity()

    def forward(self, images: Tensor) -> Tensor:
        """Returns logits [rows, classes] for images [rows, 3, height, width]."""
        logits: Tensor = self.network(pixel_values=images).logits
        return logits


def resnet50(classes: int, quick: bool, *, small: bool = False) -> ResNet50:
    """Makes the network, or a tiny one of its kind.

    Args:
        classes: How many.
        quick: Whether a tiny one will do.
        small: For small images; see :class:`ResNet50`.

    Returns:
        A model from images to logits.

    Raises:
        UserError: The package transformers is missing.
    """
    need_transformers("ResNet-50")
    return ResNet50(classes, TINY if quick else RESNET50, small=small)
