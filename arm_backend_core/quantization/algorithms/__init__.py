"""Quantization algorithms, one published method or graph transformation a module."""
