"""Compilation target: TOSA profiles, extensions and version, and the hardware family behind them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from arm_backend_core.targets.hardware import HARDWARE, Hardware
from arm_backend_core.workers.vela import Release

PROFILES = ("INT", "FP")
#: {profile: TOSA extensions that require it}. Extensions under "" work with either profile (TOSA 1.0, section 1.6; for
#: "mxfp", the draft of 1.1).
_EXTENSIONS_BY_PROFILE = {
    "INT": ("int16", "int4", "doubleround", "inexactround"),
    "FP": ("bf16", "fp8e4m3", "fp8e5m2", "fft", "mxfp"),
    "": ("variable", "controlflow"),
}
EXTENSIONS = tuple(name for names in _EXTENSIONS_BY_PROFILE.values() for name in names)
#: {extension that TOSA 1.0 lacks: first TOSA version that has it}.
_MIN_VERSION = {"mxfp": (1, 1)}
#: {ExecuTorch's name of an extension: TOSA's name}, where they differ.
EXTENSION_SYNONYMS = {"cf": "controlflow", "var": "variable"}


@dataclass(frozen=True)
class Target:
    """A TOSA profile with its extensions, and the hardware family that executes it.

    Attributes:
        name: name as users write it, for example ``ethos-u55-128`` or ``TOSA-1.0+INT+int16``.
        profiles: subset of {"INT", "FP"} (TOSA 1.0, section 1.6).
        extensions: lower-case names of TOSA extensions, for example ``int16``.
        family: "tosa", "vgf", "cortex-m" or one of ``hardware.ETHOS_U_FAMILIES``.
        macs: MACs per cycle, for an Ethos-U.
        version: TOSA version; operators of later versions are refused.
        vela_release: the release of Vela that compiles for the target. If it is None (unknown), workarounds for all
            releases apply.

    Raises:
        ValueError: the family is unknown, or an Ethos-U has no ``macs``.
    """

    name: str
    profiles: frozenset[str]
    extensions: frozenset[str]
    family: str = "tosa"
    macs: int | None = None
    version: tuple[int, int] = (1, 0)
    vela_release: Release | None = None

    def __post_init__(self) -> None:
        if self.family not in HARDWARE:
            raise ValueError(f"family: there is no hardware {self.family!r} (known: {', '.join(HARDWARE)})")
        if self.hardware.is_ethos_u and not self.macs:
            raise ValueError(f"macs: {self.name} needs its number of MACs per cycle, for example 128")

    @property
    def hardware(self) -> Hardware:
        """Limits and costs of the hardware family."""
        return HARDWARE[self.family]

    @cached_property
    def profiles_and_extensions(self) -> frozenset[str]:
        """The profiles and extensions that the target supports."""
        return self.profiles | self.extensions

    def missing_extensions(self, requirement: frozenset[str]) -> list[str]:
        """The extensions that a user can add to meet a requirement.

        Empty if extensions do not suffice, and for NPUs, whose extensions are fixed.

        Args:
            requirement: profiles and extensions that an operator needs.
        """
        available = {name for profile in ("", *self.profiles) for name in _EXTENSIONS_BY_PROFILE[profile]}
        missing = requirement - self.profiles_and_extensions
        return [] if self.hardware.is_ethos_u or not missing <= available else sorted(missing)

    @property
    def version_text(self) -> str:
        """The TOSA version as text, for example ``1.0``."""
        return ".".join(map(str, self.version))

    @property
    def has_int_profile(self) -> bool:
        """Whether quantized operators can be delegated."""
        return "INT" in self.profiles

    @property
    def has_fp_profile(self) -> bool:
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
        vela_release: Release | None = None,
    ) -> Target:
        """Parse ``TOSA-<version>+<profile or extension>...``, for example ``TOSA-1.0+INT+int16``.

        Version 1.1 is accepted only with an extension of its draft (``mxfp``). A spec with such an extension is parsed
        as version 1.1, even if it says 1.0.

        Raises:
            ValueError: the version is not supported, a part is unknown, no profile is named, or an extension lacks its
                profile.
        """
        version, *parts = (EXTENSION_SYNONYMS.get(part, part) for part in spec.split("+"))
        min_version = max((_MIN_VERSION.get(part, (1, 0)) for part in parts), default=(1, 0))
        if version not in ("TOSA-1.0", "TOSA-1.0.0") and (version != "TOSA-1.1" or min_version != (1, 1)):
            only = ", ".join(f"'{name}'" for name in _MIN_VERSION)
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
            if part in EXTENSIONS and not any(part in _EXTENSIONS_BY_PROFILE[profile] for profile in ("", *profiles)):
                raise ValueError(
                    f"tosa_spec: '{spec}' lacks the profile that '{part}' extends; add the profile, or remove '{part}'"
                )
        return cls(name or spec, profiles, frozenset(parts) - profiles, family, macs, min_version, vela_release)
