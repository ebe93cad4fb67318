"""Sandbox process, ``python sandbox.py BACKEND < payload``: run an untrusted payload once, with zeros as inputs.

The exit code is 0 on success, and ``SANDBOX_UNAVAILABLE_EXIT_CODE`` if this machine lacks a dependency. The error
message is one line on standard error. The payload runs in a process of its own, because it may crash the process.
"""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from types import ModuleType

import numpy as np

if __name__ == "__main__":
    # Register the package without its __init__, which imports PyTorch and ExecuTorch and thus takes seconds.
    package = ModuleType("arm_recipes")
    package.__path__ = [str(Path(__file__).parents[1])]
    sys.modules["arm_recipes"] = package

from arm_recipes.runtime.delegates import DELEGATE_FACTORIES, SANDBOX_UNAVAILABLE_EXIT_CODE
from arm_recipes.runtime.errors import RuntimeUnavailable
from arm_recipes.runtime.tensor_info import TensorInfo


def main() -> None:
    """Run the payload from standard input."""
    with contextlib.suppress(ImportError, ValueError, OSError):
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # no core dump: the parent process reports a crash
    try:
        delegate = DELEGATE_FACTORIES[sys.argv[1]](sys.stdin.buffer.read(), {}, lambda _: None)
        # Ethos-U delegates, whose tensors have no dtype, run on an emulator and need no sandbox.
        inputs = [tensor for tensor in delegate.inputs if isinstance(tensor, TensorInfo)]
        delegate.run([np.zeros(tensor.shape, tensor.dtype) for tensor in inputs])
    except Exception as error:
        print(str(error).replace("\n", " "), file=sys.stderr)
        raise SystemExit(SANDBOX_UNAVAILABLE_EXIT_CODE if isinstance(error, RuntimeUnavailable) else 1) from None


if __name__ == "__main__":
    main()
