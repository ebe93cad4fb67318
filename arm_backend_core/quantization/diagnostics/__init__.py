"""Diagnostics of a quantized program: error metrics, SQNR by output, tensors that calibration did not cover."""
