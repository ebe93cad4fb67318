"""Lowering rules: quantized ATen operators to kernel calls; one module per family."""
