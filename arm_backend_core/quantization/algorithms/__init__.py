"""Quantization algorithms: one published method, graph transformation or choice of precision a module."""
