"""A recurrent keyword spotter. Tests limit its cycles and memory; ``benchmarks/recurrent.py`` measures them."""

from __future__ import annotations

from torch import Tensor, nn


class KeywordSpotter(nn.Module):
    """An LSTM and a linear layer: [N, steps, 10] MFCC features to [N, 12] class scores."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.LSTM(10, 118, batch_first=True)
        self.classifier = nn.Linear(118, 12)

    def forward(self, x: Tensor) -> Tensor:
        """Classify the last step."""
        result: Tensor = self.classifier(self.layer(x)[0][:, -1])
        return result
