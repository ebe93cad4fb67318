"""``python -m arm_recipes.runtime.trial BACKEND < payload``: run a payload once, on zeros.

Ends with 0 if that works. What is wrong goes to the standard error, in one line; the process may also crash,
which is why it is one of its own.
"""

from __future__ import annotations

import contextlib
import sys

import numpy as np

from arm_recipes.runtime.delegates import BACKENDS


def main() -> None:
    """Try the payload on the standard input."""
    with contextlib.suppress(ImportError, ValueError, OSError):
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a crash is expected and reported
    try:
        delegate = BACKENDS[sys.argv[1]](sys.stdin.buffer.read())
        delegate.run([np.zeros(tensor.shape, tensor.dtype) for tensor in delegate.inputs])
    except Exception as error:
        raise SystemExit(str(error).replace("\n", " ")) from None


if __name__ == "__main__":
    main()
