"""``python sandbox.py BACKEND < payload``: run a payload once, on zeros.

Ends with 0 if that works, with ``SANDBOX_UNAVAILABLE`` if this machine lacks what it takes. What is wrong goes to the
standard error, in one line; the process may also crash, which is why it is one of its own.
"""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from types import ModuleType

import numpy as np

if __name__ == "__main__":
    # The package without its __init__, which imports PyTorch and ExecuTorch: that takes seconds.
    package = ModuleType("arm_recipes")
    package.__path__ = [str(Path(__file__).parents[1])]
    sys.modules["arm_recipes"] = package

from arm_recipes.runtime.delegates import BACKENDS, SANDBOX_UNAVAILABLE
from arm_recipes.runtime.errors import RuntimeUnavailable
from arm_recipes.runtime.tensor_info import TensorInfo


def main() -> None:
    """Try the payload on the standard input."""
    with contextlib.suppress(ImportError, ValueError, OSError):
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a crash is expected and reported
    try:
        delegate = BACKENDS[sys.argv[1]](sys.stdin.buffer.read(), {}, lambda _: None)
        # Delegates of which only bytes are known (Ethos-U) run on an emulator, and need no trial.
        described = [tensor for tensor in delegate.inputs if isinstance(tensor, TensorInfo)]
        delegate.run([np.zeros(tensor.shape, tensor.dtype) for tensor in described])
    except Exception as error:
        print(str(error).replace("\n", " "), file=sys.stderr)
        raise SystemExit(SANDBOX_UNAVAILABLE if isinstance(error, RuntimeUnavailable) else 1) from None


if __name__ == "__main__":
    main()
