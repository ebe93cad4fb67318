"""Lowering: convert an fx graph to a TOSA graph (``walk``), with readers of constants and quantization parameters."""
