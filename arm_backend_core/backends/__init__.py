"""Backends: compile TOSA flatbuffers to payloads for Ethos-U, VGF or TOSA."""
