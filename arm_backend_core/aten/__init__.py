"""Passes on ATen graphs that run before annotation and before delegation."""
