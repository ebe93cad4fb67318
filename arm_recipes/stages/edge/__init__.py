"""The stages behind delegation: the edge program, its boundary operators, and the CPU kernels it needs."""
