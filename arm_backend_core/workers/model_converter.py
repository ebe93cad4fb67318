"""Driver of the ML SDK model converter: locate it, validate its flags, run it."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

from arm_backend_core.errors import ArmBackendError
from arm_backend_core.similar_names import suggest_name
from arm_backend_core.workers.worker import describe_exit

_PACKAGE = "ai-ml-sdk-model-converter"
_MIN_VERSION = (0, 11, 0)
_EXECUTABLE = "model-converter"
_INSTALL = f"Install it with: pip install 'arm-recipes[vgf]', or '{_PACKAGE}>={'.'.join(map(str, _MIN_VERSION))}'"
_RESERVED_FLAGS = ("-i", "--input", "-o", "--output", "--tosa-flatbuffer", "-h", "--help", "-v", "--version")


def split_flags(flags: Sequence[str]) -> tuple[str, ...]:
    """Split flags into words; an entry may hold a flag and its value (``"--type-narrowing full"``).

    Raises:
        ValueError: ``flags`` is not a list of strings, has an unclosed quote, or contains a reserved flag (input,
            output, help, version).
    """
    if isinstance(flags, str) or not all(isinstance(flag, str) for flag in flags):
        raise ValueError(f"compiler_flags={flags!r}: it must be a list of strings, for example ['--emit-debug-info']")
    words = tuple(word for flag in flags for word in shlex.split(flag))
    for word in words:
        if word.split("=", 1)[0] in _RESERVED_FLAGS:
            raise ValueError(f"compiler_flags: '{word}' cannot be set here")
    return words


def find_converter() -> str:
    """Find the model converter: ``MODEL_CONVERTER_PATH``, the installed package, or ``PATH``; returns its path.

    Raises:
        ArmBackendError: it is not found, or ``MODEL_CONVERTER_PATH`` is not an executable file.
    """
    if explicit := os.environ.get("MODEL_CONVERTER_PATH"):
        if not os.access(explicit, os.X_OK) or not os.path.isfile(explicit):
            raise ArmBackendError(f"MODEL_CONVERTER_PATH='{explicit}' is not an executable file")
        return explicit
    package = importlib.util.find_spec("model_converter")
    if package is not None and package.origin is not None:
        suffix = ".exe" if os.name == "nt" else ""
        binary = Path(package.origin).parent / "binaries" / "bin" / f"{_EXECUTABLE}{suffix}"
        if os.access(binary, os.X_OK):
            return str(binary)
    path = shutil.which(_EXECUTABLE)
    if path is None:
        raise ArmBackendError(f"The VGF target needs Arm's model converter, which is not installed. {_INSTALL}")
    return path


def check_converter(flags: tuple[str, ...] = ()) -> None:
    """Check that the model converter is installed, recent enough and accepts ``flags``.

    Raises:
        ArmBackendError: it is missing or too old, does not start, or does not report its version.
        ValueError: it does not accept a flag.
    """
    _check_executable(find_converter(), flags)


@lru_cache(maxsize=16)
def _check_executable(executable: str, flags: tuple[str, ...]) -> None:
    try:
        # The converter parses flags before it prints the version, so success means that they are valid.
        result = run_converter([executable, *flags, "--version"], timeout=60)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ArmBackendError(f"The model converter '{executable}' does not start: {error}. {_INSTALL}") from None
    if result.returncode != 0:
        message = result.stderr.decode(errors="replace").strip().splitlines()
        if flags:
            problem = message[0] if message else describe_exit(result.returncode)
            known_flags = re.findall(
                r"--[a-z][a-z-]+", run_converter([executable, "--help"], timeout=60).stdout.decode()
            )
            allowed = sorted(set(known_flags) - set(_RESERVED_FLAGS))
            suggestions = [suggest_name(flag, known_flags) for flag in flags if flag not in known_flags]
            raise ValueError(
                f"compiler_flags={list(flags)}: the model converter refuses them: {problem}"
                f"{next(filter(None, suggestions), '.')} "
                f"Its flags: {', '.join(allowed)}"
            )
        raise ArmBackendError(
            f"The model converter '{executable}' {describe_exit(result.returncode)}: {' '.join(message)}. {_INSTALL}"
        )
    try:
        version = str(json.loads(result.stdout)["version"])
        numbers = tuple(int(part) for part in version.split("-")[0].split(".")[:3])
    except (ValueError, KeyError, TypeError):
        raise ArmBackendError(f"The model converter '{executable}' does not report its version. {_INSTALL}") from None
    if numbers < _MIN_VERSION:
        raise ArmBackendError(f"The model converter '{executable}' has version {version}, which is too old. {_INSTALL}")


def run_converter(command: list[str], timeout: float | None) -> subprocess.CompletedProcess[bytes]:
    """Run the converter with ``MODEL_CONVERTER_LIB_DIR`` first in the library path.

    Raises:
        subprocess.TimeoutExpired: it ran for more than ``timeout`` seconds.
        OSError: it cannot be started.
    """
    environment = dict(os.environ)
    if libraries := environment.get("MODEL_CONVERTER_LIB_DIR"):
        search = [libraries, *filter(None, [environment.get("LD_LIBRARY_PATH")])]
        environment["LD_LIBRARY_PATH"] = os.pathsep.join(search)
    return subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, env=environment, timeout=timeout, check=False
    )
