"""The host plugin as a library in this process."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any

from arm_recipes.runtime.errors import RuntimeUnavailable
from arm_recipes.runtime.lazy import once

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]


@once
def load_plugin() -> ctypes.CDLL:
    """The plugin: ``runtime/host`` and ``runtime/ethosu_emulator``.

    Raises:
        RuntimeUnavailable: it cannot be built or loaded.
    """
    # The plugin takes the runtime's symbols from the library that this import loads.
    import executorch.extension.pybindings.portable_lib  # noqa: F401

    from arm_recipes.runtime import build

    path = build.build_plugin()
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise RuntimeUnavailable(f"The plugin for ExecuTorch's runtime cannot be loaded: {error}") from error
