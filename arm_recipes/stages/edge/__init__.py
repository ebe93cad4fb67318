"""Stages after delegation: passes on the edge program, its boundary operators, and checks of CPU kernels."""
