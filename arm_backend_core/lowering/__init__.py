"""Lowering: convert an FX graph to a TOSA graph (``fx_to_tosa``); readers of constants and quantization parameters."""
