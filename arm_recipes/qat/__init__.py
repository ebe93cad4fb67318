"""Quantization-aware training: the annotated program itself, trained while it rounds as the target will."""
