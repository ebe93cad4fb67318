"""Quantization algorithms: each module implements one published method or one graph transformation."""
