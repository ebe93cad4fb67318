"""Quantization-aware training: train the annotated program with fake quantization that rounds as the target does."""
