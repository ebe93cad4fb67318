"""The recurrent network whose costs are gated, and measured by ``benchmarks/recurrent.py``."""

from __future__ import annotations

from torch import Tensor, nn


class KeywordSpotter(nn.Module):
    """Frames of 10 MFCC features in, 12 classes out."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.LSTM(10, 118, batch_first=True)
        self.classifier = nn.Linear(118, 12)

    def forward(self, x: Tensor) -> Tensor:
        """Of the last step alone."""
        result: Tensor = self.classifier(self.layer(x)[0][:, -1])
        return result
