"""Loading of the host plugin, a shared library with the delegate executors and the NPU emulator."""

from __future__ import annotations

import ctypes

from arm_recipes._internal.messages import import_quietly
from arm_recipes.runtime.errors import RuntimeUnavailable
from arm_recipes.runtime.lazy import once


@once
def load_plugin() -> ctypes.CDLL:
    """Build the plugin (``runtime/host`` and ``runtime/emulator``) if needed, and load it.

    Raises:
        RuntimeUnavailable: the plugin cannot be built or loaded.
    """
    # This import loads the library with ExecuTorch's runtime, whose symbols the plugin needs.
    import_quietly("executorch.extension.pybindings.portable_lib")

    from arm_recipes.runtime import build

    path = build.build_plugin()
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise RuntimeUnavailable(f"The plugin for ExecuTorch's runtime cannot be loaded: {error}") from error
