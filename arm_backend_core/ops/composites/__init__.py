"""Operators that are made of others, as functions of tensors.

Those that PyTorch has no decomposition for, or whose own would tear apart what a target can run whole, take long to
trace, or need operators that no target has.
"""
