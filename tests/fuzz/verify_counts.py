"""Numbers of random graphs of a release check. Importing this module does not import PyTorch."""

#: Number of graphs per target that ``--verify`` checks.
GRAPHS_PER_TARGET = {
    "TOSA_FP": 10_000,
    "TOSA_INT8": 10_000,
    "TOSA_A16W8": 2_000,
    "ETHOSU_U55_INT8": 2_000,
    "ETHOSU_U65_INT8": 2_000,
    "ETHOSU_U85_INT8": 2_000,
    "ETHOSU_U55_A16W8": 1_000,
    "ETHOSU_U65_A16W8": 1_000,
    "ETHOSU_U85_A16W8": 1_000,
    "CORTEX_M_INT8": 2_000,
    "CORTEX_M_INT8_DSP": 1_000,
    "CORTEX_M_INT8_SCALAR": 1_000,
}
