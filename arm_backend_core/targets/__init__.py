"""Targets: compile specs, hardware capabilities and the limits of operators."""
