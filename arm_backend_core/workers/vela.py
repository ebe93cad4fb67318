"""Vela client: check command lines and compile, in a worker process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as _version_of
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from arm_backend_core.errors import ArmBackendError
from arm_backend_core.workers.vela_process import PARSER_OPTION
from arm_backend_core.workers.worker import Worker, WorkerDied, WorkerError

#: Major and minor version of Vela; workarounds and estimates depend on them.
Release = tuple[int, int]
#: Supported releases. The miscompilations of other releases are unknown.
SUPPORTED_RELEASES: tuple[Release, ...] = ((5, 1), (5, 2))
PACKAGE = "ethos-u-vela"

_worker = Worker(Path(__file__).with_name("vela_process.py"))
#: Timeout in seconds. A query takes milliseconds; starting the process on a busy machine may take seconds.
_QUERY_TIMEOUT = 120.0


class InvalidFlagsError(ValueError):
    """Vela's argument parser rejected a flag. ``known_flags``: all option strings that the parser knows."""

    def __init__(self, message: str, known_flags: tuple[str, ...]) -> None:
        super().__init__(message)
        self.known_flags = known_flags


class InvalidConfigurationError(ValueError):
    """Vela rejected the combination of accelerator, system configuration and memory mode."""


@dataclass(frozen=True)
class VelaConfiguration:
    """Arguments that Vela's command line passes to its C++ core, and properties of the memory configuration.

    The core receives ``accelerator``, ``system_config`` and ``options``.

    Attributes:
        accelerator: the NPU's name in the C++ core, for example ``EthosU55``.
        system_config: text with MACs, names of the system configuration and memory mode, and the configuration file.
        options: text that contains the compiler options.
        core_clock: clock of the NPU, in Hz.
        arena_on_second_port: whether activations are placed behind the second AXI port.
        const_memory: memory that holds the constants, for example ``OffChipFlash``.
        arena_cache_size: number of SRAM bytes that Vela may use; no limit if it is equal to ``address_space``.
        address_space: bytes that the NPU can address.
    """

    accelerator: str
    system_config: str
    options: str
    core_clock: float
    arena_on_second_port: bool
    const_memory: str
    arena_cache_size: int
    address_space: int


def prestart(*, parses_flags: bool = True) -> None:
    """Start the worker process in the background, so that its start-up time overlaps other work.

    Args:
        parses_flags: whether the caller will parse flags. If True, the process imports Vela's command line parser when
            it starts, and is ready after 0.3 s. If False, the first call of ``parse_command_line`` imports the parser.
    """
    _worker.prestart(*[PARSER_OPTION] * parses_flags)


def version() -> str:
    """The version of the installed Vela, for example ``5.2.0``.

    Raises:
        ArmBackendError: Vela is not installed.
    """
    try:
        return _read_version(_version_of, PACKAGE)
    except PackageNotFoundError:
        raise ArmBackendError(_format_import_error(f"no package {PACKAGE}")) from None


@lru_cache(maxsize=8)
def _read_version(read: Callable[[str], str], package: str) -> str:
    """Read a package's version once: every export asks for it several times, and reading it takes 2 ms."""
    return read(package)


def installed_release() -> Release:
    """The release of the installed Vela; workarounds, alternatives and recorded estimates depend on it.

    Raises:
        ArmBackendError: Vela is not installed, or its release is not supported. Newer releases are refused too, because
            their bugs are unknown and a miscompiled program gives wrong results without an error.
    """
    text = version()
    installed = tuple(int(part) if part.isdigit() else -1 for part in text.split(".")[:2])
    for release in SUPPORTED_RELEASES:
        if installed == release:
            return release
    (major, minor), (last_major, last_minor) = min(SUPPORTED_RELEASES), max(SUPPORTED_RELEASES)
    raise ArmBackendError(
        f"Vela {text} is not supported; supported releases are "
        f"{' and '.join(f'{major}.{minor}' for major, minor in SUPPORTED_RELEASES)}: "
        "other versions may miscompile graphs. Install one of these with: "
        f"pip install '{PACKAGE}>={major}.{minor},<{last_major}.{last_minor + 1}'"
    )


def _format_import_error(reason: str) -> str:
    return (
        f"Vela, the compiler for Ethos-U, cannot be imported ({reason}). "
        "Install it with: pip install 'arm-recipes[ethosu]'"
    )


def config_folder() -> Path:
    """The folder of the configuration files in the installed Vela.

    Raises:
        ArmBackendError: there is no module ``ethosu.vela``.
    """
    # Without the package "ethosu", find_spec("ethosu.vela") raises an exception instead of returning None.
    spec = find_spec("ethosu.vela") if find_spec("ethosu") else None
    if spec is None or spec.origin is None:
        raise ArmBackendError(_format_import_error("no module ethosu.vela"))
    return Path(spec.origin).parents[1] / "config_files"


def parse_command_line(argv: tuple[str, ...]) -> VelaConfiguration:
    """Parse ``argv``, which must not contain a model's file, as Vela's command line does.

    Raises:
        InvalidFlagsError: the argument parser rejected a flag, or a flag makes Vela exit without compiling.
        InvalidConfigurationError: Vela rejected the configuration.
        ArmBackendError: Vela is not installed or does not start.
    """
    return VelaConfiguration(**_query("parse_command_line", list(argv)))


def compile_tosa(
    flatbuffer: bytes, configuration: VelaConfiguration, timeout: float | None, request: str = "compile", *extra: str
) -> tuple[Any, str]:
    """Compile a TOSA flatbuffer.

    Args:
        flatbuffer: the TOSA graph.
        configuration: see ``parse_command_line``.
        timeout: limit in seconds, or None.
        request: name of the worker's function to call; "compile" is ``vela_process.compile_tosa``.
        extra: further arguments of that function.

    Returns:
        The function's result, and the text that Vela printed.

    Raises:
        WorkerError: Vela refused the flatbuffer.
        WorkerDied: Vela crashed or took longer than ``timeout`` seconds.
    """
    arguments = (flatbuffer, configuration.accelerator, configuration.system_config, configuration.options)
    reply = _worker.call(request, *arguments, *extra, timeout=timeout)
    return reply.value, reply.log


def split_weights(requests: Sequence[tuple[bytes, list[int]]]) -> list[list[bytes]]:
    """Split encoded weights for U55 and U65 along the output channels: decode them, and encode each part.

    Args:
        requests: for each convolution, its encoded weights and the number of output channels in each part.

    Returns:
        For each convolution, the encoded parts; an empty list if its weights cannot be split.

    Raises:
        WorkerError: the encoder raised an exception.
        WorkerDied: the encoder crashed.
    """
    parts: list[list[bytes]] = _worker.call("split_weights", list(requests), timeout=None).value
    return parts


def _query(name: str, *arguments: Any) -> Any:
    """Call a short function of ``vela_process`` (milliseconds) and translate its errors."""
    try:
        return _worker.call(name, *arguments, timeout=_QUERY_TIMEOUT).value
    except WorkerError as error:
        if error.kind == "FlagError":
            raise InvalidFlagsError(error.message, tuple(error.detail[0])) from None
        if error.kind in ("ImportError", "ModuleNotFoundError"):
            raise ArmBackendError(_format_import_error(error.message)) from None
        raise InvalidConfigurationError(error.message) from None
    except WorkerDied as death:
        raise ArmBackendError(f"Vela's process {death.description}. {death.log}".strip()) from None
