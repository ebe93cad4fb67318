"""Fake quantization for training (QAT): a differentiable program that rounds as the target does."""
