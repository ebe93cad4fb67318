"""Processes of their own for native tools that may crash: Vela, the reference model; how the converter is found."""
