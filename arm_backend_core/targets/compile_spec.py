"""Compile specs: target and compiler options, with the class and argument names of ExecuTorch's Arm backend."""

from __future__ import annotations

import os
from abc import ABC
from collections.abc import Sequence
from enum import Enum
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Self

from arm_backend_core.targets.cortex_m import DEFAULT_CPU, Isa, resolve_isa
from arm_backend_core.targets.target import Target

if TYPE_CHECKING:
    from executorch.exir.backend.compile_spec_schema import CompileSpec

    from arm_backend_core.workers.vela import VelaConfiguration

#: {NPU family: (system configuration, memory mode)}: the defaults of Arm's tooling.
_DEFAULT_CONFIGS = {
    "ethos-u55": ("Ethos_U55_High_End_Embedded", "Shared_Sram"),
    "ethos-u65": ("Ethos_U65_High_End", "Dedicated_Sram_384KB"),
    "ethos-u85": ("Ethos_U85_SYS_DRAM_Mid", "Sram_Only"),
}
DEFAULT_CONFIG_INI = "Arm/vela.ini"
#: Values of the argument ``optimise`` of ``EthosUCompileSpec``.
GOALS = ("auto", "performance", "size", "ram")


class ArmCompileSpec(ABC):
    """Base class of the compile specs.

    Attributes:
        target: the target to compile for.
        compiler_flags: flags for the compiler of the TOSA graph: Vela, or the model converter for VGF.
        isa: instruction set of the int8 kernels that compute quantized operators outside delegates. If it is None,
            these operators stay in floating point.
    """

    class DebugMode(Enum):
        """Where debug information is written: ``JSON`` to a separate file, ``TOSA`` into the flatbuffer."""

        JSON = 1
        TOSA = 2

    #: The backend id in the program, by which the runtime finds the backend.
    backend_id: ClassVar[str]
    #: Whether a recipe replaces quantize and dequantize operators outside delegates by ``cortex_m`` operators, for
    #: which firmware has kernels. If False, the runtime needs ExecuTorch's quantize kernels.
    uses_cortex_m_quantize: ClassVar[bool] = False
    _output_format: ClassVar[str]

    def __init__(self, target: Target, compiler_flags: Sequence[str] = ()) -> None:
        self.target = target
        self.compiler_flags = list(compiler_flags)
        self.isa: Isa | None = None
        self._intermediate_path: str | None = None
        self._debug_mode: ArmCompileSpec.DebugMode | None = None

    @property
    def tosa_spec(self) -> str:
        """The TOSA version, profiles and extensions, for example ``TOSA-1.0+INT+int16``."""
        parts = [name for name in ("INT", "FP") if name in self.target.profiles]
        return "+".join([f"TOSA-{self.target.version_text}", *parts, *sorted(self.target.extensions)])

    @property
    def debug_mode(self) -> ArmCompileSpec.DebugMode | None:
        """The mode that the last ``dump_debug_info`` call set; None if no debug information is written."""
        return self._debug_mode

    def dump_intermediate_artifacts_to(self, output_path: str | os.PathLike[str] | None) -> Self:
        """Write each delegate's flatbuffer and compiler output to ``output_path``; None disables it."""
        self._intermediate_path = None if output_path is None else os.fspath(output_path)
        return self

    def get_intermediate_path(self) -> str | None:
        """The folder of the last ``dump_intermediate_artifacts_to`` call."""
        return self._intermediate_path

    def dump_debug_info(self, debug_mode: ArmCompileSpec.DebugMode | str | None) -> Self:
        """Write the ATen node of each TOSA operator; needs ``dump_intermediate_artifacts_to``.

        Raises:
            ValueError: ``debug_mode`` is neither a member of ``DebugMode`` nor the name of one.
        """
        if isinstance(debug_mode, str) and debug_mode in ArmCompileSpec.DebugMode.__members__:
            debug_mode = ArmCompileSpec.DebugMode[debug_mode]
        if debug_mode is not None and not isinstance(debug_mode, ArmCompileSpec.DebugMode):
            names = ", ".join(ArmCompileSpec.DebugMode.__members__)
            raise ValueError(f"debug_mode={debug_mode!r}: it must be a member of ArmCompileSpec.DebugMode: {names}")
        self._debug_mode = debug_mode
        return self

    @classmethod
    def get_output_format(cls) -> str:
        """Format of the payload: "tosa", "vela" or "vgf"; "pte" for Cortex-M, which has no payload."""
        return cls._output_format

    def to_list(self) -> list[CompileSpec]:
        """The key/value pairs that the program stores.

        Raises:
            ValueError: debug information is requested without a folder for it.
        """
        from executorch.exir.backend.compile_spec_schema import CompileSpec

        return [CompileSpec(key, value.encode()) for key, value in self._entries().items()]

    def _entries(self) -> dict[str, str]:
        entries = {"tosa_spec": self.tosa_spec}
        if self.compiler_flags:
            entries["compile_flags"] = " ".join(map(_strip_folder, self.compiler_flags))
        entries["output_format"] = self.get_output_format()
        if self._debug_mode is not None and self._intermediate_path is None:
            raise ValueError("dump_debug_info() needs dump_intermediate_artifacts_to(path)")
        if self._debug_mode is not None:
            entries["dump_debug_info"] = self._debug_mode.name
        return entries


def _strip_folder(flag: str) -> str:
    """Remove the folder from an absolute path in a flag, so that programs do not differ between machines."""
    option, equals, value = flag.rpartition("=")
    return option + equals + (Path(value).name if Path(value).is_absolute() else value)


class TosaCompileSpec(ArmCompileSpec):
    """Stop at TOSA: the payload is the TOSA flatbuffer.

    Args:
        tosa_spec: ``TOSA-1.0`` (or ``TOSA-1.1`` with ``mxfp``), then profiles and extensions, separated by plus signs.

    Raises:
        ValueError: ``tosa_spec`` is malformed.
    """

    backend_id = "TOSABackend"
    uses_cortex_m_quantize = True
    _output_format = "tosa"

    def __init__(self, tosa_spec: str = "TOSA-1.0+INT+int16") -> None:
        super().__init__(Target.from_tosa_spec(str(tosa_spec)))


class EthosUCompileSpec(ArmCompileSpec):
    """Compile for an Ethos-U with Vela.

    The constructor checks the arguments with the installed Vela and the ``.ini``. It skips this check if the system
    configuration, the memory mode, the flags and the ``.ini`` are the defaults.

    Args:
        target: the NPU, for example ``ethos-u85-256``.
        system_config: system configuration in the ``.ini``; None for the family's default in Arm's tooling.
        memory_mode: memory mode in the ``.ini``; None for the family's default in Arm's tooling.
        extra_flags: flags of Vela's command line, for example ``["--optimise=Size"]``.
        config_ini: path of an ``.ini`` file, or the name of a file that Vela or this package ships (``Arm/vela.ini``,
            the default).
        search_alternatives: choose among equivalent alternatives of operators by Vela's estimates; if False, use the
            default alternatives.
        optimise: Vela's goal, "performance" or "size". "auto" compiles for both goals and keeps the better program,
            "ram" searches for the program with the least RAM (``alternatives/size_or_speed.py``).
        cpu: the Cortex-M beside the NPU. Its int8 kernels compute the quantized operators outside delegates. If it is
            None, these operators stay in floating point.

    Attributes:
        sram_budget: bytes of SRAM that the program may use with the goal "auto"; None for no limit.
        accelerator: Vela's name of the NPU.

    Raises:
        ValueError: an argument is wrong; the message names it and the reason, and usually the allowed values.
        ArmBackendError: Vela is not installed, or its release is not supported.
    """

    backend_id = "EthosUBackend"
    uses_cortex_m_quantize = True
    _output_format = "vela"

    def __init__(
        self,
        target: str,
        system_config: str | None = None,
        memory_mode: str | None = None,
        extra_flags: Sequence[str] | None = None,
        config_ini: str | os.PathLike[str] | None = None,
        search_alternatives: bool = True,
        optimise: str = "performance",
        cpu: str | None = None,
    ) -> None:
        from arm_backend_core.targets import vela_config
        from arm_backend_core.workers import vela

        npu = vela_config.parse_npu(target)
        default_system, default_mode = _DEFAULT_CONFIGS[npu.family]
        self.accelerator = npu.name
        self.system_config = default_system if system_config is None else system_config
        self.memory_mode = default_mode if memory_mode is None else memory_mode
        config_file = DEFAULT_CONFIG_INI if config_ini is None else config_ini
        if optimise not in GOALS:
            raise ValueError(f"optimise={optimise!r}: unknown goal. Allowed: {', '.join(GOALS)}")
        flags = (*vela_config.split_flags(extra_flags or ()), *["--optimise=Size"] * (optimise == "size"))
        vela_config.config_path(config_file)  # raises an exception for a path that cannot be read
        self.config_ini, self.search_alternatives, self.extra_flags = os.fspath(config_file), search_alternatives, flags
        self.sram_budget: int | None = None
        self._npu, self.optimise = npu, optimise
        is_default = (self.system_config, self.memory_mode) == _DEFAULT_CONFIGS[npu.family]
        if is_default and not extra_flags and config_file == DEFAULT_CONFIG_INI:
            # The defaults need no check. Vela's process starts now, in parallel with the caller's next steps.
            is_cached = vela_config.is_configuration_cached(
                npu, self.system_config, self.memory_mode, flags, self.config_ini
            )
            vela.prestart(parses_flags=not is_cached)
        elif "optimize=Size" in self.configuration.options:
            self.optimise = "size"
        super().__init__(
            Target(
                npu.name,
                frozenset({"INT"}),
                _ETHOS_U_EXTENSIONS,
                npu.family,
                npu.macs,
                vela_release=vela.installed_release(),
            ),
            vela_config.command_line(npu, self.system_config, self.memory_mode, flags, self.config_ini),
        )
        self.isa = None if cpu is None else resolve_isa(cpu)

    @cached_property
    def configuration(self) -> VelaConfiguration:
        """The arguments as Vela's command line parser returns them."""
        from arm_backend_core.targets import vela_config

        return vela_config.resolve_configuration(
            self._npu, self.system_config, self.memory_mode, self.extra_flags, self.config_ini
        )

    def _entries(self) -> dict[str, str]:
        return {**super()._entries(), "target": self.accelerator}


#: Extensions that Vela's report of supported operators contains for every Ethos-U family.
_ETHOS_U_EXTENSIONS = frozenset({"int16", "int4", "doubleround"})


class VgfCompileSpec(ArmCompileSpec):
    """Convert to a VGF file with the ML SDK model converter.

    Args:
        tosa_spec: ``TOSA-1.0``, then profiles and extensions, separated by plus signs.
        compiler_flags: flags of the model converter, for example ``["--emit-debug-info"]``.

    Raises:
        ValueError: ``tosa_spec`` is malformed or later than 1.0, or the converter does not take a flag.
        ArmBackendError: the model converter is missing or too old.
    """

    backend_id = "VgfBackend"
    _output_format = "vgf"

    def __init__(self, tosa_spec: str = "TOSA-1.0+INT+FP+int16", compiler_flags: Sequence[str] | None = None) -> None:
        from arm_backend_core.workers import model_converter

        target = Target.from_tosa_spec(str(tosa_spec), family="vgf")
        if target.version > (1, 0):
            raise ValueError(f"tosa_spec: the VGF converter takes TOSA 1.0; '{tosa_spec}' is {target.version_text}")
        super().__init__(target, model_converter.split_flags(compiler_flags or ()))
        model_converter.check_converter(tuple(self.compiler_flags))


class CortexMCompileSpec(ArmCompileSpec):
    """Lower to int8 kernels that a Cortex-M executes; there are no delegates.

    Args:
        cpu: the processor, for example ``cortex-m55``.
        isa: instruction set of the kernels; None for the fastest that the processor may have.

    Attributes:
        isa: the instruction set.

    Raises:
        ValueError: there is no such processor, or it does not have the instruction set.
    """

    backend_id = ""
    uses_cortex_m_quantize = True
    _output_format = "pte"

    def __init__(self, cpu: str = DEFAULT_CPU, isa: Isa | str | None = None) -> None:
        resolved = resolve_isa(cpu, isa)
        super().__init__(Target(cpu, frozenset({"INT"}), frozenset(), "cortex-m"))
        self.isa = resolved
