"""Compilation target: TOSA profiles, extensions and version, and the hardware family behind them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from arm_backend_core.targets.hardware import HARDWARE, Hardware
from arm_backend_core.workers.vela import Release

PROFILES = ("INT", "FP")
#: TOSA's extensions by the profile that they extend, "" for both (TOSA 1.0, section 1.4; "mxfp" of the draft of 1.1).
_EXTENDING = {
    "INT": ("int16", "int4", "doubleround", "inexactround"),
    "FP": ("bf16", "fp8e4m3", "fp8e5m2", "fft", "mxfp"),
    "": ("variable", "controlflow"),
}
EXTENSIONS = tuple(name for names in _EXTENDING.values() for name in names)
#: The first TOSA version with an extension, if it is not 1.0.
_SINCE = {"mxfp": (1, 1)}
#: ExecuTorch's names of some extensions.
SYNONYMS = {"cf": "controlflow", "var": "variable"}


@dataclass(frozen=True)
class Target:
    """A TOSA profile with its extensions, and the hardware family that executes it.

    Attributes:
        name: as the user writes it, for example ``ethos-u55-128`` or ``TOSA-1.0+INT+int16``.
        profiles: subset of {"INT", "FP"} (TOSA 1.0, section 1.5).
        extensions: lower-case names of TOSA extensions, for example ``int16``.
        family: "tosa", "vgf" or one of ``hardware.ETHOS_U_FAMILIES``.
        macs: MACs per cycle, for an Ethos-U.
        version: TOSA version; operators of later versions are refused.
        vela: the release of Vela that compiles for it. None if unknown: then the bugs of all releases are avoided.

    Raises:
        ValueError: an Ethos-U without ``macs``, or an unknown family.
    """

    name: str
    profiles: frozenset[str]
    extensions: frozenset[str]
    family: str = "tosa"
    macs: int | None = None
    version: tuple[int, int] = (1, 0)
    vela: Release | None = None

    def __post_init__(self) -> None:
        if self.family not in HARDWARE:
            raise ValueError(f"family: there is no hardware {self.family!r} (known: {', '.join(HARDWARE)})")
        if self.hardware.npu and not self.macs:
            raise ValueError(f"macs: {self.name} needs its number of MACs per cycle, for example 128")

    @property
    def hardware(self) -> Hardware:
        """Limits and costs of the hardware family."""
        return HARDWARE[self.family]

    @cached_property
    def supports(self) -> frozenset[str]:
        """Profiles and extensions."""
        return self.profiles | self.extensions

    @property
    def version_text(self) -> str:
        """The TOSA version as text, for example ``1.0``."""
        return ".".join(map(str, self.version))

    @property
    def integer(self) -> bool:
        """Whether quantized operators can be delegated."""
        return "INT" in self.profiles

    @property
    def floating(self) -> bool:
        """Whether float32 operators can be delegated."""
        return "FP" in self.profiles

    @classmethod
    def from_tosa_spec(
        cls,
        spec: str,
        *,
        family: str = "tosa",
        name: str | None = None,
        macs: int | None = None,
        vela: Release | None = None,
    ) -> Target:
        """Parse ``TOSA-<version>+<profile or extension>...``, for example ``TOSA-1.0+INT+int16``.

        Version 1.1 is accepted only with an extension of its draft, and such an extension implies it.

        Raises:
            ValueError: the version is another one, a part is unknown, or no profile is named.
        """
        version, *parts = (SYNONYMS.get(part, part) for part in spec.split("+"))
        later = max((_SINCE.get(part, (1, 0)) for part in parts), default=(1, 0))
        if version not in ("TOSA-1.0", "TOSA-1.0.0") and (version != "TOSA-1.1" or later != (1, 1)):
            only = ", ".join(f"'{name}'" for name in _SINCE)
            raise ValueError(f"tosa_spec: '{spec}' must start with 'TOSA-1.0'; 1.1 is supported with {only} only")
        unknown = [part for part in parts if part not in PROFILES + EXTENSIONS]
        if unknown:
            raise ValueError(
                f"tosa_spec: unknown part {unknown[0]!r} in '{spec}'. "
                f"Profiles: {', '.join(PROFILES)}; extensions: {', '.join(EXTENSIONS)}"
            )
        profiles = frozenset(part for part in parts if part in PROFILES)
        if not profiles:
            raise ValueError(f"tosa_spec: '{spec}' names no profile; add '+INT', '+FP' or both")
        for part in parts:
            if part in EXTENSIONS and not any(part in _EXTENDING[profile] for profile in ("", *profiles)):
                raise ValueError(
                    f"tosa_spec: '{spec}' lacks the profile that '{part}' extends; add the profile, or remove '{part}'"
                )
        return cls(name or spec, profiles, frozenset(parts) - profiles, family, macs, later, vela)
