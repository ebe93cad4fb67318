"""Training with fake quantization: a program that rounds as the target does, differentiably."""
