"""Cost model of Cortex-M processors: estimated cycles of kernel calls and of other operators on the CPU.

An estimate is the number of executed instructions times the cycles per instruction of the processor. ``kernels`` and
``portable_kernels`` count instructions, ``processors`` has the cycles per instruction.
``docs/contributors/cpu_cycles.md`` compares the estimates with published measurements.
"""
