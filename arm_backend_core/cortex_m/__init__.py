"""int8 kernels of Cortex-M processors: ExecuTorch's ``cortex_m`` operators, most of which call CMSIS-NN."""
