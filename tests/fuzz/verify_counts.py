"""Numbers of random graphs of a release check. Importing this module does not import PyTorch."""

#: Number of graphs per target that ``--verify`` checks: about an hour for all targets on two cores. Each release draws
#: other graphs (``tests.verify.default_seed``), so the numbers add up from release to release.
GRAPHS_PER_TARGET = {
    "TOSA_FP": 800,
    "TOSA_INT8": 1_000,
    "TOSA_A16W8": 300,
    "ETHOSU_U55_INT8": 200,
    "ETHOSU_U65_INT8": 150,
    "ETHOSU_U85_INT8": 200,
    "ETHOSU_U55_A16W8": 100,
    "ETHOSU_U65_A16W8": 100,
    "ETHOSU_U85_A16W8": 100,
    "CORTEX_M_INT8": 200,
    "CORTEX_M_INT8_DSP": 100,
    "CORTEX_M_INT8_SCALAR": 100,
}
