"""int8 kernels of Cortex-M processors: ExecuTorch's ``cortex_m`` operators, which call CMSIS-NN."""
