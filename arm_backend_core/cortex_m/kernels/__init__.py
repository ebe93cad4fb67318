"""One record per kernel of ExecuTorch's ``cortex_m`` library; one module per family."""
