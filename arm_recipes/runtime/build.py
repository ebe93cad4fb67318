"""Compile the host plugin and the firmware's trial run against the installed ExecuTorch, once; later uses take them
from a cache.

There is no wheel of them to install: they have to match the ExecuTorch library of this environment, and compiling
takes some seconds.
"""

from __future__ import annotations

import hashlib
import os
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path

from arm_backend_core.alternatives.disk_cache import cache_folder
from arm_recipes.runtime.errors import RuntimeUnavailable

#: C++ sources, which a wheel of this project holds too.
SOURCES = Path(__file__).parent / "cpp"
_HOST, _EMULATOR = "host", "ethosu_emulator"
_HOST_UNITS = ("host/plugin.cpp", "host/cortex_m_kernels.cpp")
#: What a firmware has, with a simulated NPU, and the program that runs it in pools of given sizes.
_FIRMWARE = ("ethosu", "ethosu_simulated", "firmware", "payload", _HOST)
_FIRMWARE_UNITS = (
    "firmware/pools.cpp",
    "ethosu/ethosu_backend.cpp",
    "ethosu/npu_driver.cpp",
    "ethosu_simulated/driver.cpp",
    "ethosu_simulated/emulator_in_library.cpp",
    "payload/ethosu_payload.cpp",
    "host/cortex_m_kernels.cpp",
    "host/cortex_m_kernels_registered.cpp",
)
#: The emulator's loops are written to be vectorized, which takes -O3; -fno-math-errno lets the rounding of a quantize
#: kernel be one instruction.
_FLAGS = ("-std=c++17", "-O3", "-fPIC", "-fvisibility=hidden", "-fno-math-errno", "-Wall")
#: The wheel's headers take the generated macros of its own copy of c10.
_DEFINES = ("-DC10_USING_CUSTOM_GENERATED_MACROS", "-DET_EVENT_TRACER_ENABLED")


def build_plugin() -> Path:
    """Path of the plugin's shared library; compiles it if the cache has none for this ExecuTorch.

    The cache is ``$XDG_CACHE_HOME/arm-recipes`` (``~/.cache/arm-recipes``); the compiler is ``$CXX``, else g++,
    clang++ or c++.

    Raises:
        RuntimeUnavailable: there is no compiler, it failed, or the cache cannot be written.
    """
    executorch = _executorch_folder()
    link = ("-shared", f"-L{executorch / 'lib'}", "-lexecutorch")
    target = cache_folder() / f"host_plugin-{_cache_key(executorch)}.so"
    if not target.exists():
        _compile(executorch, target, plugin_sources(), link)
    return target


def build_firmware_runner() -> Path:
    """Path of ``runtime/firmware/pools.cpp``, compiled; as ``build_plugin``, which has the emulator of the NPU.

    Raises:
        RuntimeUnavailable: as ``build_plugin``.
    """
    executorch, emulator = _executorch_folder(), build_plugin()
    library = executorch / "lib"
    # Kernels register themselves: nothing refers to their libraries.
    kernels = ("-Wl,--no-as-needed", "-lexecutorch_kernels_optimized", "-lexecutorch_kernels_quantized")
    link = (str(emulator), f"-L{library}", *kernels, "-lexecutorch", f"-Wl,-rpath,{library}")
    target = cache_folder() / f"firmware_trial-{_cache_key(executorch, _FIRMWARE, link)}"
    if not target.exists():
        _compile(executorch, target, [SOURCES / unit for unit in _FIRMWARE_UNITS], link)
    return target


def plugin_sources() -> list[Path]:
    """The sources of the plugin."""
    return [*(SOURCES / unit for unit in _HOST_UNITS), *sorted((SOURCES / _EMULATOR).glob("*.cpp"))]


def _executorch_folder() -> Path:
    import executorch.runtime

    return Path(executorch.runtime.__file__).parents[1]


def _cache_key(executorch: Path, folders: Sequence[str] = (_HOST, _EMULATOR), link: Sequence[str] = ()) -> str:
    """Changes with everything that the library is made from."""
    library = (executorch / "lib" / "libexecutorch.so").stat()
    digest = hashlib.sha256(
        repr((version("executorch"), str(executorch), library.st_size, library.st_mtime_ns)).encode()
    )
    digest.update(repr((_FLAGS, _DEFINES, *link)).encode())
    for source in sorted(path for folder in folders for path in (SOURCES / folder).iterdir()):
        digest.update(source.name.encode() + source.read_bytes())
    return digest.hexdigest()[:24]


def _find_compiler() -> list[str]:
    """The compiler's command line so far: ``CXX`` may have a launcher and flags, as in ``ccache g++``."""
    given = os.environ.get("CXX", "")
    try:
        chosen = shlex.split(given)
    except ValueError as error:
        raise RuntimeUnavailable(f"CXX={given} cannot be read as a command: {error}") from error
    for command in [chosen] if chosen else [["g++"], ["clang++"], ["c++"]]:
        found = shutil.which(command[0])
        if found:
            return [found, *command[1:]]
    problem = f"CXX='{given}' is not there" if chosen else "there is none"
    raise RuntimeUnavailable(
        "Running programs on this machine takes a C++17 compiler, to build a small plugin for ExecuTorch's runtime "
        f"once, and {problem}. Install one (Debian: apt-get install g++), or set CXX. Exporting does not need it."
    )


def _compile(executorch: Path, target: Path, sources: Sequence[Path], link: Sequence[str]) -> None:
    include = executorch / "include"
    includes = [
        *("-I", str(SOURCES), "-isystem", str(SOURCES / "ethosu_simulated"), "-isystem", str(include)),
        *("-isystem", str(include / "executorch/runtime/core/portable_type/c10")),
    ]
    command = [*_find_compiler(), *_FLAGS]
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        # Under another name first: another process may build or load it at this moment.
        with tempfile.TemporaryDirectory(dir=target.parent) as folder:
            made = Path(folder) / target.name
            objects = [str(Path(folder) / f"{number}.o") for number in range(len(sources))]
            jobs = [
                [*command, *_DEFINES, *includes, "-c", str(source), "-o", to]
                for source, to in zip(sources, objects, strict=True)
            ]
            # Somebody waits for it: all processors at once.
            with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
                list(pool.map(_run, jobs))
            _run([*command, *objects, *link, "-o", str(made)])
            os.replace(made, target)
    except OSError as error:
        raise RuntimeUnavailable(
            f"The plugin for ExecuTorch's runtime cannot be built in '{target.parent}': {error.strerror or error}. "
            "Set XDG_CACHE_HOME to a folder that can be written."
        ) from error


def _run(command: list[str]) -> None:
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        said = f"{' '.join(command)}\n{result.stderr.strip()}"
        raise RuntimeUnavailable(f"Compiling the plugin for ExecuTorch's runtime failed:\n{said}")
