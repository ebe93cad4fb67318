"""Build of the host plugin and of the program ``measure_pools`` from C++ sources, with a cache of the binaries.

The binaries must match the ExecuTorch library of this environment, so no wheel contains them. Compilation takes about
10 s on two cores.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from importlib.metadata import version
from pathlib import Path

from arm_backend_core.disk_cache import cache_folder
from arm_recipes._internal.messages import announce, import_quietly
from arm_recipes.runtime.errors import RuntimeUnavailable

#: Folder of the C++ sources, which wheels of this project contain.
CPP_FOLDER = Path(__file__).parent / "cpp"
_EMULATOR_FOLDER = "emulator"
#: Source folders of the plugin.
_PLUGIN_FOLDERS = ("common", "host", "kernels", _EMULATOR_FOLDER)
#: Registers the kernels at program start. The plugin does not contain this file: the plugin's own code registers them.
_REGISTRATION_SOURCE = "kernels/cortex_m_kernels_static_registration.cpp"
#: Source folders of ``measure_pools``, which executes a ``.pte`` on this machine in memory pools of given sizes. This
#: executable contains the Ethos-U backend that firmware uses. It is linked to the plugin, and calls the plugin's NPU
#: emulator.
_MEASURE_POOLS_FOLDERS = ("backends/ethosu", "common", "emulator/driver", "firmware", "kernels", "payload", "tools")
_MEASURE_POOLS_SOURCES = (
    "tools/measure_pools.cpp",
    "backends/ethosu/ethosu_backend.cpp",
    "backends/ethosu/npu_driver.cpp",
    "emulator/driver/driver.cpp",
    "emulator/driver/emulator_shared.cpp",
    "payload/ethosu_payload.cpp",
    _REGISTRATION_SOURCE,
)
#: Compilers to try if the environment variable ``CXX`` is not set.
_COMPILERS = ("g++", "clang++", "c++")
#: -O3 vectorizes the emulator's loops. With -fno-math-errno, the rounding in the quantize kernels compiles to one
#: instruction.
_COMPILER_FLAGS = ("-std=c++17", "-O3", "-fPIC", "-fvisibility=hidden", "-fno-math-errno", "-Wall")
#: ExecuTorch's wheel contains headers of c10, but not the generated ``cmake_macros.h``, which they do not include if
#: ``C10_USING_CUSTOM_GENERATED_MACROS`` is defined.
_DEFINES = ("-DC10_USING_CUSTOM_GENERATED_MACROS", "-DET_EVENT_TRACER_ENABLED")


def build_plugin() -> Path:
    """Return the path of the plugin, and compile the plugin if necessary.

    A plugin in the cache is reused if sources, ExecuTorch and ``CXX`` are the same. The cache is
    ``$XDG_CACHE_HOME/arm-recipes`` (default ``~/.cache/arm-recipes``). The compiler is ``$CXX``, otherwise g++, clang++
    or c++.

    Raises:
        RuntimeUnavailable: there is no compiler, compilation failed, or the cache is not writable.
    """
    executorch = _executorch_folder()
    link_flags = ("-shared", f"-L{executorch / 'lib'}", "-lexecutorch")
    target = _cache_path(f"host_plugin-{_cache_key(executorch)}.so")
    if not target.exists():
        _build_binary("the plugin for ExecuTorch's runtime", executorch, target, list_plugin_sources(), link_flags)
    return target


def build_measure_pools() -> Path:
    """Return the path of the executable ``measure_pools`` (``runtime/tools/measure_pools.cpp``), for this machine.

    It is compiled if the cache does not have it. It links to the plugin, which contains the NPU emulator.

    Raises:
        RuntimeUnavailable: as for ``build_plugin``.
    """
    executorch, emulator = _executorch_folder(), build_plugin()
    library = executorch / "lib"
    # Kernels register themselves when their library is loaded. ``measure_pools`` uses no symbol of these libraries,
    # so the linker would drop them by default.
    kernels = ("-Wl,--no-as-needed", "-lexecutorch_kernels_optimized", "-lexecutorch_kernels_quantized")
    link_flags = (str(emulator), f"-L{library}", *kernels, "-lexecutorch", f"-Wl,-rpath,{library}")
    target = _cache_path(f"measure_pools-{_cache_key(executorch, _MEASURE_POOLS_FOLDERS, link_flags)}")
    if not target.exists():
        sources = [*(CPP_FOLDER / unit for unit in _MEASURE_POOLS_SOURCES), *list_kernel_sources()]
        _build_binary("the firmware program measure_pools", executorch, target, sources, link_flags)
    return target


def _cache_path(name: str) -> Path:
    try:
        return cache_folder() / name
    except OSError as error:
        raise RuntimeUnavailable(str(error)) from None


def list_plugin_sources() -> list[Path]:
    """C++ sources of the plugin."""
    emulator = sorted((CPP_FOLDER / _EMULATOR_FOLDER).glob("*.cpp"))
    return [CPP_FOLDER / "host/plugin.cpp", *list_kernel_sources(), *emulator]


def list_kernel_sources() -> list[Path]:
    """C++ sources of the kernels, without the one that registers them at program start."""
    sources = sorted((CPP_FOLDER / "kernels").glob("*.cpp"))
    return [source for source in sources if source != CPP_FOLDER / _REGISTRATION_SOURCE]


def combine_kernels(sources: Sequence[Path], folder: Path) -> list[Path]:
    """Replace the kernels among ``sources`` by one file in ``folder`` that includes all of them (unity build).

    This saves time: ExecuTorch's headers take most of the compile time of a kernel, and one file includes them only
    once. Names in the anonymous namespaces of the kernels must differ, because the kernels share a translation unit.
    """
    kernels = [source for source in list_kernel_sources() if source in sources]
    combined = folder / "cortex_m_kernels_combined.cpp"
    combined.write_text("".join(f'#include "{source.relative_to(CPP_FOLDER)}"\n' for source in kernels))
    return [combined, *(source for source in sources if source not in kernels)]


def _executorch_folder() -> Path:
    return Path(str(import_quietly("executorch.runtime").__file__)).parents[1]


def _cache_key(executorch: Path, folders: Sequence[str] = _PLUGIN_FOLDERS, link_flags: Sequence[str] = ()) -> str:
    """Hash of ExecuTorch's version and library, flags, sources and ``CXX``.

    The hash depends on the text of ``CXX``, not on the compiler itself. Therefore, a machine without a compiler can use
    the cache.
    """
    library = (executorch / "lib" / "libexecutorch.so").stat()
    digest = hashlib.sha256(
        repr((version("executorch"), str(executorch), library.st_size, library.st_mtime_ns)).encode()
    )
    digest.update(repr((_COMPILER_FLAGS, _DEFINES, *link_flags, _cxx_variable())).encode())
    for source in sorted(path for folder in folders for path in (CPP_FOLDER / folder).iterdir() if path.is_file()):
        digest.update(source.name.encode() + source.read_bytes())
    return digest.hexdigest()[:24]


def _cxx_variable() -> str:
    """The variable ``CXX``, empty if not set. It may contain a launcher and flags, for example ``ccache g++``."""
    return os.environ.get("CXX", "")


def _find_compiler(what: str) -> list[str]:
    """Find the compiler, and return its path and the flags in ``CXX``; ``what`` names the binary in errors."""
    variable = _cxx_variable()
    try:
        command_line = shlex.split(variable)
    except ValueError as error:
        raise RuntimeUnavailable(f"CXX={variable} cannot be read as a command: {error}") from error
    for command in [command_line] if command_line else [[name] for name in _COMPILERS]:
        path = shutil.which(command[0])
        if path:
            return [path, *command[1:]]
    not_found = f"CXX='{variable}' does not exist" if command_line else f"none of {', '.join(_COMPILERS)} is on PATH"
    raise RuntimeUnavailable(
        f"Running programs on this machine needs a C++17 compiler, which builds {what} once, and {not_found}. "
        "Install one (Debian: apt-get install g++), or set CXX. Exporting does not need it."
    )


def _build_binary(
    what: str, executorch: Path, target: Path, sources: Sequence[Path], link_flags: Sequence[str]
) -> None:
    include = executorch / "include"
    includes = (
        *("-I", str(CPP_FOLDER), "-isystem", str(CPP_FOLDER / "emulator/driver"), "-isystem", str(include)),
        *("-isystem", str(include / "executorch/runtime/core/portable_type/c10")),
    )
    command = [*_find_compiler(what), *_COMPILER_FLAGS]
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with _lock(target.parent):
            if target.exists():  # another process built it while this one waited for the lock
                return
            announce(f"Building {what}, once for this version of ExecuTorch. This takes about 10 s.")
            # Build under a temporary name and rename, because another process may load the file without the lock.
            with tempfile.TemporaryDirectory(dir=target.parent) as folder:
                binary = Path(folder) / target.name
                units = combine_kernels(sources, Path(folder))
                objects = _compile(what, [*command, *_DEFINES, *includes], units, Path(folder))
                _run_compiler(what, [*command, *objects, *link_flags, "-o", str(binary)])
                os.replace(binary, target)
    except OSError as error:
        raise RuntimeUnavailable(
            f"Building {what}: cannot write to the cache '{target.parent}': {error.strerror or error}. "
            "Set XDG_CACHE_HOME to a writable folder."
        ) from error


def _compile(what: str, command: Sequence[str], sources: Sequence[Path], folder: Path) -> list[str]:
    """Compile each source to an object file in ``folder``, on all processors, because the user waits."""
    objects = [str(folder / f"{i}.o") for i in range(len(sources))]
    commands = [[*command, "-c", str(source), "-o", file] for source, file in zip(sources, objects, strict=True)]
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        list(pool.map(partial(_run_compiler, what), commands))
    return objects


@contextmanager
def _lock(folder: Path) -> Iterator[None]:
    """Wait until no other process builds into ``folder``, and lock the folder inside the ``with`` block.

    The operating system releases the lock of a process that ends. Some network file systems have no locks: several
    processes may then build the same file, and the last one replaces it.
    """
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _run_compiler(what: str, command: Sequence[str]) -> None:
    try:
        result = subprocess.run(command, capture_output=True, encoding="utf-8", errors="replace", check=False)
    except OSError as error:
        raise RuntimeUnavailable(
            f"Building {what}: the compiler '{command[0]}' cannot be started: {error.strerror}. Set CXX to another one."
        ) from error
    if result.returncode != 0:
        raise RuntimeUnavailable(f"Compiling {what} failed:\n{' '.join(command)}\n{result.stderr.strip()}")
