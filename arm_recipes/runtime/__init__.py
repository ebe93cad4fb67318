"""Load, run and inspect programs on this machine."""
