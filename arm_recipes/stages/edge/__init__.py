"""Passes on the operators outside of delegates, checks of CPU kernels, and weight sharing among methods."""
