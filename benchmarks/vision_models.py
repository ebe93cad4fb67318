"""Networks for detection, poses, segmentation and restoration of images, written from their papers, at small sizes."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


def _conv(
    inputs: int, outputs: int, size: int = 3, stride: int = 1, groups: int = 1, activation: nn.Module | None = None
) -> nn.Sequential:
    """Convolution, batch normalization and activation, ReLU by default."""
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, size, stride, size // 2, groups=groups, bias=False),
        nn.BatchNorm2d(outputs),
        nn.ReLU() if activation is None else activation,
    )


class _C2f(nn.Module):
    """The block of YOLOv8: a chain of bottlenecks whose results are all concatenated."""

    def __init__(self, inputs: int, outputs: int, count: int = 1, *, is_residual: bool = True) -> None:
        super().__init__()
        half = outputs // 2
        self.is_residual = is_residual
        self.enter = _conv(inputs, outputs, 1, activation=nn.SiLU())
        self.chain = nn.ModuleList(
            nn.Sequential(_conv(half, half, activation=nn.SiLU()), _conv(half, half, activation=nn.SiLU()))
            for _ in range(count)
        )
        self.leave = _conv(half * (2 + count), outputs, 1, activation=nn.SiLU())

    def forward(self, x: Tensor) -> Tensor:
        parts = list(self.enter(x).chunk(2, 1))
        for bottleneck in self.chain:
            y = bottleneck(parts[-1])
            parts.append(parts[-1] + y if self.is_residual else y)
        result: Tensor = self.leave(torch.cat(parts, 1))
        return result


class YoloV8(nn.Module):
    """Detector with anchor-free heads (Ultralytics YOLOv8, a quarter of the width of its smallest model).

    Returns boxes [N, 4, positions] as centre and size in pixels, and scores [N, classes, positions].
    """

    _BINS = 16
    anchors: Tensor
    strides: Tensor
    bins: Tensor

    def __init__(self, classes: int = 10, image: int = 128) -> None:
        super().__init__()
        act = nn.SiLU()
        self.stem = nn.Sequential(_conv(3, 8, 3, 2, activation=act), _conv(8, 16, 3, 2, activation=act), _C2f(16, 16))
        self.stage3 = nn.Sequential(_conv(16, 32, 3, 2, activation=act), _C2f(32, 32, 2))
        self.stage4 = nn.Sequential(_conv(32, 48, 3, 2, activation=act), _C2f(48, 48, 2))
        self.stage5 = nn.Sequential(_conv(48, 64, 3, 2, activation=act), _C2f(64, 64))
        self.narrow, self.widen = _conv(64, 32, 1, activation=act), _conv(128, 64, 1, activation=act)
        self.up4, self.up3 = _C2f(112, 48, is_residual=False), _C2f(80, 32, is_residual=False)
        self.down4, self.down5 = _conv(32, 32, 3, 2, activation=act), _conv(48, 48, 3, 2, activation=act)
        self.out4, self.out5 = _C2f(80, 48, is_residual=False), _C2f(112, 64, is_residual=False)
        widths = (32, 48, 64)
        self.boxes, self.scores = (
            nn.ModuleList(nn.Sequential(_conv(w, 32, activation=act), nn.Conv2d(32, n, 1)) for w in widths)
            for n in (4 * self._BINS, classes)
        )
        strides = (8, 16, 32)
        grids = [torch.cartesian_prod(*[torch.arange(image // s) + 0.5] * 2).flip(1) for s in strides]
        self.register_buffer("anchors", torch.cat(grids).T)
        self.register_buffer(
            "strides", torch.cat([torch.full((len(g),), float(s)) for g, s in zip(grids, strides, strict=True)])
        )
        self.register_buffer("bins", torch.arange(self._BINS, dtype=torch.float32).view(1, -1, 1, 1))

    def _levels(self, x: Tensor) -> tuple[Tensor, ...]:
        level3 = self.stage3(self.stem(x))
        level4 = self.stage4(level3)
        level5 = self.stage5(level4)
        pooled = [self.narrow(level5)]
        for _ in range(3):
            pooled.append(F.max_pool2d(pooled[-1], 5, 1, 2))
        level5 = self.widen(torch.cat(pooled, 1))
        level4 = self.up4(torch.cat([F.interpolate(level5, scale_factor=2.0), level4], 1))
        level3 = self.up3(torch.cat([F.interpolate(level4, scale_factor=2.0), level3], 1))
        level4 = self.out4(torch.cat([self.down4(level3), level4], 1))
        return level3, level4, self.out5(torch.cat([self.down5(level4), level5], 1))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Map (N, 3, H, W) to boxes and scores."""
        levels = self._levels(x)
        boxes = torch.cat([head(level).flatten(2) for head, level in zip(self.boxes, levels, strict=True)], 2)
        scores = torch.cat([head(level).flatten(2) for head, level in zip(self.scores, levels, strict=True)], 2)
        distribution = boxes.unflatten(1, (4, self._BINS)).transpose(1, 2).softmax(1)
        left_top, right_bottom = (distribution * self.bins).sum(1).chunk(2, 1)
        low, high = self.anchors - left_top, self.anchors + right_bottom
        return torch.cat([(low + high) / 2, high - low], 1) * self.strides, torch.sigmoid(scores)


class _ConditionalWeights(nn.Module):
    """A block of Lite-HRNet: weights of channels from all resolutions, then a depthwise convolution."""

    def __init__(self, widths: tuple[int, ...]) -> None:
        super().__init__()
        total = sum(widths)
        self.widths = widths
        self.cross = nn.Sequential(_conv(total, total // 4, 1), nn.Conv2d(total // 4, total, 1), nn.Sigmoid())
        self.depthwise = nn.ModuleList(_conv(w, w, groups=w) for w in widths)
        self.spatial = nn.ModuleList(
            nn.Sequential(
                nn.AdaptiveAvgPool2d(1), nn.Conv2d(w, w // 4, 1), nn.ReLU(), nn.Conv2d(w // 4, w, 1), nn.Sigmoid()
            )
            for w in widths
        )

    def forward(self, levels: list[Tensor]) -> list[Tensor]:
        height, width = levels[-1].shape[-2:]
        weights = self.cross(torch.cat([F.adaptive_avg_pool2d(level, (height, width)) for level in levels], 1))
        results = []
        for level, weight, depthwise, spatial in zip(
            levels, weights.split(self.widths, 1), self.depthwise, self.spatial, strict=True
        ):
            y = depthwise(level * F.interpolate(weight, size=level.shape[-2:]))
            results.append(level + y * spatial(y))
        return results


class LiteHrNetSimCc(nn.Module):
    """Pose estimation: Lite-HRNet (Yu et al., 2021, arXiv:2104.06403) with SimCC heads (Li et al., 2022,
    arXiv:2107.03332): a distribution of each joint over columns and rows.
    """

    def __init__(self, joints: int = 17, height: int = 128, width: int = 96) -> None:
        super().__init__()
        self.stem = nn.Sequential(_conv(3, 16, 3, 2), _conv(16, 16, 3, 2))
        self.down = _conv(16, 32, 3, 2)
        self.blocks = nn.ModuleList(_ConditionalWeights((16, 32)) for _ in range(3))
        self.merge = _conv(48, 32, 1)
        self.joints = nn.Conv2d(32, joints, 1)
        positions = (height // 4) * (width // 4)
        self.columns, self.rows = nn.Linear(positions, 2 * width), nn.Linear(positions, 2 * height)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Map (N, 3, 128, 96) to (N, joints, 192) and (N, joints, 256)."""
        x = self.stem(x)
        levels = [x, self.down(x)]
        for block in self.blocks:
            levels = block(levels)
        up = F.interpolate(levels[1], scale_factor=2.0, mode="bilinear", align_corners=False)
        joints = self.joints(self.merge(torch.cat([levels[0], up], 1))).flatten(2)
        return self.columns(joints), self.rows(joints)


class _GatherExpand(nn.Module):
    """The gather-and-expansion layer of BiSeNetV2."""

    def __init__(self, inputs: int, outputs: int, stride: int = 1) -> None:
        super().__init__()
        wide = inputs * 6
        self.enter = _conv(inputs, inputs)
        self.expand = _conv(inputs, wide, 3, stride, inputs, nn.Identity())
        self.leave = _conv(wide, outputs, 1, activation=nn.Identity())
        self.shortcut = (
            nn.Sequential(
                _conv(inputs, inputs, 3, stride, inputs, nn.Identity()),
                _conv(inputs, outputs, 1, activation=nn.Identity()),
            )
            if stride > 1
            else nn.Identity()
        )

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.shortcut(x) + self.leave(self.expand(self.enter(x))))


class BiSeNetV2(nn.Module):
    """Segmentation by a detail branch and a semantic branch (Yu et al., 2021, arXiv:2004.02147)."""

    def __init__(self, classes: int = 8) -> None:
        super().__init__()
        self.detail = nn.Sequential(
            _conv(3, 16, 3, 2), _conv(16, 16), _conv(16, 32, 3, 2), _conv(32, 32), _conv(32, 48, 3, 2)
        )
        self.stem = _conv(3, 8, 3, 2)
        self.stem_left = nn.Sequential(_conv(8, 4, 1), _conv(4, 8, 3, 2))
        self.stem_merge = _conv(16, 8)
        self.semantic = nn.Sequential(
            _GatherExpand(8, 16, 2), _GatherExpand(16, 16), _GatherExpand(16, 32, 2), _GatherExpand(32, 48, 2)
        )
        self.context = _conv(48, 48, 1)
        self.detail_keep, self.semantic_keep, self.semantic_gate = (nn.Conv2d(48, 48, 1) for _ in range(3))
        self.detail_down = nn.Sequential(_conv(48, 48, 3, 2, activation=nn.Identity()), nn.AvgPool2d(3, 2, 1))
        self.head = nn.Sequential(_conv(48, 48), nn.Conv2d(48, classes, 1))

    def forward(self, x: Tensor) -> Tensor:
        """Map (N, 3, H, W) to scores (N, classes, H, W)."""
        detail, x = self.detail(x), self.stem(x)
        x = self.stem_merge(torch.cat([self.stem_left(x), F.max_pool2d(x, 3, 2, 1)], 1))
        semantic = self.semantic(x)
        semantic = semantic + self.context(semantic.mean((2, 3), keepdim=True))
        fine = self.detail_keep(detail) * F.interpolate(torch.sigmoid(self.semantic_gate(semantic)), scale_factor=4.0)
        coarse = self.detail_down(detail) * torch.sigmoid(self.semantic_keep(semantic))
        scores = self.head(fine + F.interpolate(coarse, scale_factor=4.0, mode="bilinear"))
        return F.interpolate(scores, scale_factor=8.0, mode="bilinear")


class _FeatureDistillation(nn.Module):
    """A block of RFDN with enhanced spatial attention."""

    def __init__(self, width: int) -> None:
        super().__init__()
        half = width // 2
        self.kept = nn.ModuleList(nn.Conv2d(width, half, 1) for _ in range(3))
        self.refined = nn.ModuleList(nn.Conv2d(width, width, 3, padding=1) for _ in range(3))
        self.last = nn.Conv2d(width, half, 3, padding=1)
        self.merge = nn.Conv2d(4 * half, width, 1)
        self.narrow, self.skip = nn.Conv2d(width, 12, 1), nn.Conv2d(12, 12, 1)
        self.strided, self.pooled = nn.Conv2d(12, 12, 3, 2), nn.Conv2d(12, 12, 3, padding=1)
        self.gate = nn.Conv2d(12, width, 1)

    def forward(self, x: Tensor) -> Tensor:
        kept, y = [], x
        for keep, refine in zip(self.kept, self.refined, strict=True):
            kept.append(F.leaky_relu(keep(y), 0.05))
            y = F.leaky_relu(refine(y) + y, 0.05)
        y = self.merge(torch.cat([*kept, F.leaky_relu(self.last(y), 0.05)], 1))
        narrow = self.narrow(y)
        attention = self.pooled(F.max_pool2d(self.strided(narrow), 7, 3))
        attention = F.interpolate(attention, size=y.shape[-2:], mode="bilinear", align_corners=False)
        return x + y * torch.sigmoid(self.gate(attention + self.skip(narrow)))


class Rfdn(nn.Module):
    """Super-resolution by 2 (Liu et al., 2020, arXiv:2009.11551)."""

    def __init__(self, width: int = 24, blocks: int = 3) -> None:
        super().__init__()
        self.head = nn.Conv2d(3, width, 3, padding=1)
        self.blocks = nn.ModuleList(_FeatureDistillation(width) for _ in range(blocks))
        self.merge = nn.Sequential(
            nn.Conv2d(width * blocks, width, 1), nn.LeakyReLU(0.05), nn.Conv2d(width, width, 3, padding=1)
        )
        self.tail = nn.Sequential(nn.Conv2d(width, 12, 3, padding=1), nn.PixelShuffle(2))

    def forward(self, x: Tensor) -> Tensor:
        """Map (N, 3, H, W) to (N, 3, 2 H, 2 W)."""
        x = self.head(x)
        outputs, y = [], x
        for block in self.blocks:
            y = block(y)
            outputs.append(y)
        image: Tensor = self.tail(x + self.merge(torch.cat(outputs, 1)))
        return image


class _LayerNorm2d(nn.Module):
    """Layer normalization over the channels of an image, x[N, C, H, W]."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.weight, self.bias = (nn.Parameter(torch.full((channels, 1, 1), value)) for value in (1.0, 0.0))

    def forward(self, x: Tensor) -> Tensor:
        centred = x - x.mean(1, keepdim=True)
        return self.weight * centred * (centred.square().mean(1, keepdim=True) + 1e-6).rsqrt() + self.bias


class _NafBlock(nn.Module):
    """A block of NAFNet: gates of two halves instead of activations."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = _LayerNorm2d(width), _LayerNorm2d(width)
        self.spatial = nn.Sequential(
            nn.Conv2d(width, 2 * width, 1), nn.Conv2d(2 * width, 2 * width, 3, 1, 1, groups=2 * width)
        )
        self.attention, self.leave = nn.Conv2d(width, width, 1), nn.Conv2d(width, width, 1)
        self.enter2, self.leave2 = nn.Conv2d(width, 2 * width, 1), nn.Conv2d(width, width, 1)
        self.scale1, self.scale2 = (nn.Parameter(torch.rand(width, 1, 1)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        a, b = self.spatial(self.norm1(x)).chunk(2, 1)
        y = a * b
        x = x + self.scale1 * self.leave(y * self.attention(y.mean((2, 3), keepdim=True)))
        a, b = self.enter2(self.norm2(x)).chunk(2, 1)
        return x + self.scale2 * self.leave2(a * b)


class NafNet(nn.Module):
    """Image restoration (Chen et al., 2022, arXiv:2204.04676)."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.head, self.tail = nn.Conv2d(3, width, 3, padding=1), nn.Conv2d(width, 3, 3, padding=1)
        self.encoder, self.middle, self.decoder = _NafBlock(width), _NafBlock(2 * width), _NafBlock(width)
        self.down = nn.Conv2d(width, 2 * width, 2, 2)
        self.up = nn.Sequential(nn.Conv2d(2 * width, 4 * width, 1, bias=False), nn.PixelShuffle(2))

    def forward(self, image: Tensor) -> Tensor:
        """Map (N, 3, H, W) to the same shape; H and W are even."""
        skip = self.encoder(self.head(image))
        x = self.decoder(self.up(self.middle(self.down(skip))) + skip)
        result: Tensor = image + self.tail(x)
        return result
