"""Compilation of the C++ sources in ``runtime/`` for tests."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
RUNTIME = ROOT / "runtime"
#: Warning flags for the sources of this project; warnings are errors.
WARNINGS = ["-Wall", "-Wextra", "-Wpedantic", "-Wshadow", "-Wconversion", "-Wno-unused-parameter", "-Werror"]
SANITIZERS = ["-g1", "-O0", "-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer"]


def executorch_directory() -> Path:
    """Return the folder of the installed ``executorch`` package."""
    spec = find_spec("executorch")
    locations = spec.submodule_search_locations if spec else None
    assert locations, "executorch is not installed"
    return Path(next(iter(locations)))


def executorch_include_flags() -> list[str]:
    """Return the compiler flags for the headers of the installed ``executorch`` package."""
    include = executorch_directory() / "include"
    portable = include / "executorch/runtime/core/portable_type/c10"
    return ["-DC10_USING_CUSTOM_GENERATED_MACROS", "-isystem", str(include), "-isystem", str(portable)]


def executorch_link_flags() -> list[str]:
    """Return the linker flags for the runtime of the installed ``executorch`` package."""
    library = executorch_directory() / "lib"
    return [f"-L{library}", "-lexecutorch", f"-Wl,-rpath,{library}"]


def run(command: Sequence[str], env: Mapping[str, str] | None = None) -> str:
    """Run ``command`` and return its standard output and standard error.

    Raises:
        AssertionError: it failed; the message has the command and its output.
    """
    done = subprocess.run(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        check=False,
        env=None if env is None else dict(env),
    )
    assert done.returncode == 0, f"{' '.join(command)}\nexited with {done.returncode}:\n{done.stdout}"
    return done.stdout


def require(tool: str, package: str) -> str:
    """Find ``tool`` and return its path.

    Raises:
        AssertionError: it is not installed; the message names the Debian ``package`` that has it.
    """
    path = shutil.which(tool)
    assert path is not None, f"{tool} is missing: apt-get install {package}"
    return path


def compile_cpp(
    output: Path,
    sources: Sequence[Path],
    flags: Sequence[str] = (),
    *,
    compiler: str = "g++",
    link: Sequence[str] = (),
) -> Path:
    """Compile and link ``sources`` into ``output``, with warnings as errors; ``link`` has flags for the linker only.

    Each source is compiled separately, so that ``ccache`` keeps its object file. No two sources have the same name.
    """
    tool = require(
        compiler, {"clang++-14": "clang-14", "arm-none-eabi-g++": "gcc-arm-none-eabi"}.get(compiler, compiler)
    )
    command = [tool, "-std=c++17", *WARNINGS, f"-I{RUNTIME}", *flags]
    objects = [output.with_name(f"{output.name}.{source.stem}.o") for source in sources]
    # As in CMake's builds. ``tests/conftest.py`` sets the variable.
    launcher = os.environ.get("CMAKE_CXX_COMPILER_LAUNCHER", "").split()
    for source, compiled in zip(sources, objects, strict=True):
        run([*launcher, *command, "-c", "-o", str(compiled), str(source)])
    run([*command, "-o", str(output), *map(str, objects), *link])
    return output
