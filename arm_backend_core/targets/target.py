"""What a target can run, in TOSA's terms."""

from __future__ import annotations

from dataclasses import dataclass

_PROFILES = ("INT", "FP")
_EXTENSIONS = (
    "int16",
    "int4",
    "bf16",
    "fp8e4m3",
    "fp8e5m2",
    "fft",
    "variable",
    "controlflow",
    "doubleround",
    "inexactround",
)
#: Vela's families: integer-only NPUs with limits beyond the TOSA profile.
ETHOS_U_FAMILIES = ("ethos-u55", "ethos-u65", "ethos-u85")


@dataclass(frozen=True)
class Target:
    """A TOSA 1.0 profile with its extensions, and the hardware family behind it.

    Attributes:
        name: as the user writes it, for example ``ethos-u55-128`` or ``TOSA-1.0+INT+int16``.
        profiles: subset of {"INT", "FP"} (TOSA 1.0, section 1.5).
        extensions: lower-case names of TOSA extensions, for example ``int16``.
        family: "tosa", "vgf" or one of ``ETHOS_U_FAMILIES``; the legality tables look here for limits.
    """

    name: str
    profiles: frozenset[str]
    extensions: frozenset[str]
    family: str = "tosa"

    @property
    def integer(self) -> bool:
        """Whether quantized operators can be delegated."""
        return "INT" in self.profiles

    @property
    def floating(self) -> bool:
        """Whether float32 operators can be delegated."""
        return "FP" in self.profiles

    @classmethod
    def from_tosa_spec(cls, spec: str, *, family: str = "tosa", name: str | None = None) -> Target:
        """Parse ``TOSA-<version>+<profile or extension>...``, for example ``TOSA-1.0+INT+int16``.

        Raises:
            ValueError: the version is not 1.0, a part is unknown, or no profile is named.
        """
        version, *parts = spec.split("+")
        if version not in ("TOSA-1.0", "TOSA-1.0.0"):
            raise ValueError(f"tosa_spec: '{spec}' must start with 'TOSA-1.0', the only version that is written")
        unknown = [part for part in parts if part not in _PROFILES + _EXTENSIONS]
        if unknown:
            raise ValueError(
                f"tosa_spec: unknown part {unknown[0]!r} in '{spec}'. "
                f"Profiles: {', '.join(_PROFILES)}; extensions: {', '.join(_EXTENSIONS)}"
            )
        profiles = frozenset(part for part in parts if part in _PROFILES)
        if not profiles:
            raise ValueError(f"tosa_spec: '{spec}' names no profile; add '+INT', '+FP' or both")
        return cls(name or spec, profiles, frozenset(parts) - profiles, family)
