"""Diagnostics of a quantized program: error metrics, SQNR by output, values that calibration did not cover."""
