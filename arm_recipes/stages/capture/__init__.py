"""Capture of a model with ``torch.export``."""
