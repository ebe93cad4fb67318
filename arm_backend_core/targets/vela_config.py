"""NPUs, system configurations, memory modes and flags that the installed Vela supports, and their validation.

System configurations and memory modes come from the ``.ini``, flags from Vela. Two combinations that Vela accepts are
rejected here: activations behind the second AXI port of an NPU that cannot write there (``_try_resolve``), and the
system configuration of another NPU family (``_check_system_config``).
"""

from __future__ import annotations

import configparser
import os
import re
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from arm_backend_core.similar_names import format_suggestion, suggest_name
from arm_backend_core.targets import configuration_cache
from arm_backend_core.targets.hardware import ETHOS_U_FAMILIES, HARDWARE
from arm_backend_core.workers import vela
from arm_backend_core.workers.vela import VelaConfiguration

#: Prefixes of section names in an ``.ini``.
SYSTEM_CONFIG, MEMORY_MODE = "System_Config.", "Memory_Mode."
#: {flag that only the compile spec may set: what the user can do instead}, the end of an error message.
_RESERVED = {
    "--accelerator-config": "use the argument 'target'",
    "--system-config": "use the argument 'system_config'",
    "--memory-mode": "use the argument 'memory_mode'",
    "--config": "use the argument 'config_ini'",
    "--output-dir": "use dump_intermediate_artifacts_to(path)",
    "--output-format": "the program's format needs 'raw'",
}


@dataclass(frozen=True)
class Npu:
    """An NPU that Vela compiles for: its ``family``, such as ``ethos-u55``, and MACs per cycle."""

    family: str
    macs: int

    @property
    def name(self) -> str:
        """Vela's name, for example ``ethos-u55-128``."""
        return f"{self.family}-{self.macs}"


def list_npus() -> tuple[Npu, ...]:
    """All NPUs of the hardware table. All supported releases of Vela compile for them, which a test checks.

    Raises:
        ArmBackendError: Vela is not installed, or its release is not supported.
    """
    vela.installed_release()
    return tuple(Npu(family, macs) for family in ETHOS_U_FAMILIES for macs in HARDWARE[family].macs)


def list_families() -> tuple[str, ...]:
    """NPU families, for example ``ethos-u55``, in the order of the hardware table."""
    return tuple(dict.fromkeys(npu.family for npu in list_npus()))


def list_macs(family: str) -> tuple[int, ...]:
    """MACs per cycle of each variant of ``family``.

    Raises:
        ValueError: the family is unknown.
    """
    if family not in list_families():
        raise ValueError(_format_error("family", family, "Vela knows no such NPU", list_families()))
    return tuple(npu.macs for npu in list_npus() if npu.family == family)


def parse_npu(target: str) -> Npu:
    """Parse the name of an NPU; case does not matter.

    Raises:
        ValueError: ``target`` is not a string, the family is unknown, or the family has no such number of MACs.
    """
    names = tuple(item.name for item in list_npus())
    if not isinstance(target, str):
        raise ValueError(_format_error("target", target, "it must be a string", names))
    if target.lower() in list_families():
        allowed = tuple(item.name for item in list_npus() if item.family == target.lower())
        raise ValueError(_format_error("target", target, "the number of MACs is missing", allowed))
    family, _, number = target.lower().rpartition("-")
    if family not in list_families() or not number.isdigit():
        raise ValueError(_format_error("target", target, "Vela knows no such NPU", names))
    if int(number) not in list_macs(family):
        allowed = tuple(f"{family}-{count}" for count in list_macs(family))
        nearest = min(list_macs(family), key=lambda count: abs(count - int(number)))
        reason = f"{family} has no configuration with {number} MACs"
        raise ValueError(_format_error("target", target, reason, allowed, f"{family}-{nearest}"))
    return Npu(family, int(number))


def shipped_configs() -> tuple[str, ...]:
    """Names of the configuration files that Vela or this package ships, for example ``Arm/vela.ini``."""
    return tuple(sorted(_shipped_paths()))


def _shipped_paths() -> dict[str, Path]:
    folders = (Path(__file__).parent / "config_files", vela.config_folder())
    return {path.relative_to(folder).as_posix(): path for folder in folders for path in folder.glob("*/*.ini")}


def config_path(config_ini: str | os.PathLike[str]) -> Path:
    """Resolve ``config_ini``, the name of a file in ``shipped_configs`` or a path.

    Raises:
        ValueError: the argument is not a path, or the file does not exist, cannot be read, or is not called ``*.ini``.
    """
    if not isinstance(config_ini, (str, os.PathLike)):
        raise ValueError(_format_error("config_ini", config_ini, "it must be a path", shipped_configs()))
    name = os.fspath(config_ini)
    path = _shipped_paths().get(name, Path(name).expanduser().absolute())
    if not path.is_file():
        reason = f"no such file; tried '{path}'"
        raise ValueError(_format_error("config_ini", name, reason, shipped_configs(), list_label="Shipped"))
    if path.suffix != ".ini":
        raise ValueError(f"config_ini={name!r}: Vela takes only files whose name ends in '.ini'")
    if not os.access(path, os.R_OK):
        raise ValueError(f"config_ini={name!r}: no permission to read '{path}'")
    return path


def list_sections(config_ini: str | os.PathLike[str], kind: str) -> tuple[str, ...]:
    """Names of the system configurations (``kind`` is ``SYSTEM_CONFIG``) or memory modes (``MEMORY_MODE``) in the file.

    Raises:
        ValueError: there is no such file, or it is not in ini format.
    """
    path = config_path(config_ini)
    stat = path.stat()
    names = _read_section_names(path, (stat.st_mtime_ns, stat.st_size))
    return tuple(name.removeprefix(kind) for name in names if name.startswith(kind))


def core_clock(config_ini: str | os.PathLike[str], system_config: str) -> float:
    """The NPU's clock in Hz, from the section of a system configuration in the file.

    Raises:
        ValueError: there is no such file, or it is not in ini format.
        KeyError: there is no such section, or it does not contain ``core_clock`` itself (``inherit`` is not followed).
    """
    parser = _read_ini(config_path(config_ini))
    return float(parser[SYSTEM_CONFIG + system_config]["core_clock"])


@lru_cache(maxsize=8)
def _read_section_names(path: Path, stamp: tuple[int, int]) -> tuple[str, ...]:
    """Read the names of all sections, once per content of the file: ``stamp`` is its modification time and size."""
    return tuple(_read_ini(path).sections())


def _read_ini(path: Path) -> configparser.ConfigParser:
    parser = configparser.ConfigParser()
    try:
        parser.read(path)
    except (configparser.Error, UnicodeDecodeError) as error:
        raise ValueError(f"config_ini='{path}': not a valid Vela configuration: {error}") from None
    return parser


def resolve_configuration(
    target: Npu, system_config: str, memory_mode: str, flags: Iterable[str], config_ini: str | os.PathLike[str]
) -> VelaConfiguration:
    """Validate the combination of NPU, system configuration, memory mode and flags with Vela.

    Returns:
        The configuration for the compiler.

    Raises:
        ValueError: an argument is wrong; the message names it and the reason, and usually the allowed values.
    """
    path = config_path(config_ini)
    _check_system_config(target, system_config, path)
    modes = list_sections(path, MEMORY_MODE)
    if memory_mode not in modes:
        raise ValueError(_format_error("memory_mode", memory_mode, f"it is not in '{path}'", modes))
    words = split_flags(flags)
    outcome = _try_resolve(target, system_config, memory_mode, words, path)
    if isinstance(outcome, VelaConfiguration):
        return outcome
    usable_modes = [
        name
        for name in modes
        if name != memory_mode and isinstance(_try_resolve(target, system_config, name, words, path), VelaConfiguration)
    ]
    description = f"{target.name} with system_config='{system_config}'"
    if usable_modes:
        raise ValueError(
            _format_error("memory_mode", memory_mode, f"not possible on {description}: {outcome}", usable_modes)
        )
    raise ValueError(f"config_ini='{path}': no memory mode works on {description}: {outcome}")


def is_configuration_cached(
    target: Npu, system_config: str, memory_mode: str, flags: Sequence[str], config_ini: str | os.PathLike[str]
) -> bool:
    """Whether the cache holds the result of ``resolve_configuration`` for these arguments, which must be valid."""
    path = config_path(config_ini)
    argv = _full_command_line(target, system_config, memory_mode, flags, path)
    return configuration_cache.find_configuration(argv, path) is not None


def split_flags(flags: Iterable[str]) -> tuple[str, ...]:
    """Split flags into words; an entry may hold a flag and its value (``"--optimise Size"``).

    Raises:
        ValueError: not an iterable of strings, or a flag that another argument sets.
    """
    if isinstance(flags, str) or not isinstance(flags, Iterable):
        raise ValueError(f"extra_flags={flags!r}: it must be a list of strings, for example ['--optimise=Size']")
    words: list[str] = []
    for flag in flags:
        if not isinstance(flag, str):
            raise ValueError(f"extra_flags: {flag!r} is not a string")
        words += shlex.split(flag)
    for word in words:
        reserved = _RESERVED.get(word.split("=", 1)[0])
        if reserved:
            raise ValueError(f"extra_flags: '{word}' cannot be set here; {reserved}")
    return tuple(words)


def command_line(
    target: Npu, system_config: str, memory_mode: str, flags: Sequence[str], config_ini: str
) -> tuple[str, ...]:
    """Vela's command line arguments. If a flag occurs twice, Vela uses the last value, so ``flags`` come first."""
    return (
        *flags,
        f"--accelerator-config={target.name}",
        f"--config={config_ini}",
        "--output-format=raw",
        f"--system-config={system_config}",
        f"--memory-mode={memory_mode}",
    )


def _try_resolve(
    target: Npu, system_config: str, memory_mode: str, flags: tuple[str, ...], path: Path
) -> VelaConfiguration | str:
    """The configuration, or the reason why Vela or this module refuses it.

    Raises:
        ValueError: Vela refuses a flag.
    """
    argv = _full_command_line(target, system_config, memory_mode, flags, path)
    try:
        configuration = configuration_cache.get_configuration(argv, path)
    except vela.InvalidFlagsError as error:
        raise ValueError(_format_flag_error(str(error), flags, error.known_flags)) from None
    except vela.InvalidConfigurationError as error:
        return _add_sram_hint(target, str(error))
    # Vela accepts activations behind the second AXI port if the system configuration has SRAM or DRAM there.
    if HARDWARE[target.family].writes_sram_only and configuration.arena_on_second_port:
        return _add_sram_hint(target, "it places the activations behind the second AXI port")
    return configuration


def _full_command_line(
    target: Npu, system_config: str, memory_mode: str, flags: Sequence[str], path: Path
) -> tuple[str, ...]:
    # Vela writes its estimates per layer to the debug database. This option does not change the compiled program.
    return ("--enable-debug-db", *command_line(target, system_config, memory_mode, flags, str(path)))


def _add_sram_hint(target: Npu, problem: str) -> str:
    """If the NPU can write to SRAM only, say so in a message about activations or the arena."""
    if HARDWARE[target.family].writes_sram_only and ("arena" in problem or "activations" in problem):
        return f"{problem}. The {target.family.title()} can write to SRAM only, so activations must be kept there"
    return problem


def _family_in_name(system_config: str) -> str | None:
    """The family in the name of a system configuration, for example ``ethos-u85``; None if the name contains none."""
    match = re.match(r"ethos_(u\d+)", system_config, re.IGNORECASE)
    return f"ethos-{match[1].lower()}" if match else None


def _check_system_config(target: Npu, system_config: str, path: Path) -> None:
    """Raise ValueError if the file lacks the system configuration, or its name contains another NPU family."""
    names = list_sections(path, SYSTEM_CONFIG)
    # Vela accepts any system configuration for any NPU, and estimates cycles with the clock and memories of the
    # configuration. If the name of a configuration contains a family, the configuration describes a system with this
    # family. Other names are accepted.
    allowed = [name for name in names if _family_in_name(name) in (target.family, None)]
    if system_config not in names:
        raise ValueError(_format_error("system_config", system_config, f"it is not in '{path}'", allowed))
    if system_config not in allowed:
        reason = f"it describes a system with {_family_in_name(system_config)}, but the target is {target.name}"
        raise ValueError(_format_error("system_config", system_config, reason, allowed))


def _format_flag_error(problem: str, flags: Sequence[str], known_flags: Sequence[str]) -> str:
    """Format the message for flags that Vela rejects; ``known_flags`` are all flags that Vela accepts."""
    names = [flag.split("=", 1)[0] for flag in flags if flag.startswith("-")]
    suggestions = [suggest_name(name, known_flags) for name in names if name not in known_flags]
    message = f"extra_flags={list(flags)}: Vela refuses them: {problem}{next(filter(None, suggestions), '.')}"
    if "unrecognized" in problem:
        usable = [flag for flag in known_flags if flag.startswith("--") and flag not in _RESERVED]
        message += f" Vela's flags: {', '.join(usable)}"
    return message


def _format_error(
    argument: str,
    value: object,
    reason: str,
    allowed: Sequence[str],
    nearest: str | None = None,
    list_label: str = "Allowed",
) -> str:
    suggestion = suggest_name(str(value), allowed) if nearest is None else format_suggestion([nearest])
    return f"{argument}={value!r}: {reason}{suggestion or '.'} {list_label}: {', '.join(allowed) or 'none'}"
