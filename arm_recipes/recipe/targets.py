"""What each recipe compiles for, by its name. The command line reads it too, so nothing here imports PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from difflib import get_close_matches
from functools import partial
from typing import TYPE_CHECKING, Any

from arm_recipes.recipe import options

if TYPE_CHECKING:
    from arm_backend_core.targets.compile_spec import ArmCompileSpec

Options = dict[str, Any]
#: A stream for the NPU's own driver on Linux, with regions for inputs and outputs.
_DIRECT_DRIVE = ("--cop-format=COP2", "--separate-io-regions")
_DIRECT_DRIVE_NAMES = tuple(flag.partition("=")[0] for flag in _DIRECT_DRIVE)


def _ethos_u(family: str, default_macs: int) -> Callable[[Options], ArmCompileSpec]:
    def build(given: Options) -> ArmCompileSpec:
        from arm_backend_core.targets import vela_config
        from arm_backend_core.targets.compile_spec import EthosUCompileSpec

        macs, allowed = given["macs"] or default_macs, vela_config.macs(family)
        if macs not in allowed:
            nearest = min(allowed, key=lambda count: abs(count - macs))
            raise ValueError(
                f"macs={macs}: no {family} has that many; did you mean {nearest}? "
                f"(allowed: {', '.join(map(str, allowed))})"
            )
        flags = _vela_flags(given)
        spec = EthosUCompileSpec(
            f"{family}-{macs}",
            system_config=given["system_config"],
            memory_mode=given["memory_mode"],
            extra_flags=flags or None,
            config_ini=None if given["config_ini"] is None else str(given["config_ini"]),
            search_alternatives=given["search_alternatives"],
            optimise=_goal(given["optimise"], flags),
        )
        budget = given["sram_budget"]
        spec.sram_budget = None if budget is None else options.parse_bytes(budget)
        return spec

    return build


def _goal(optimise: str, flags: Sequence[str]) -> str:
    """What Vela optimises for; where a flag says so, "auto" leaves it to the flag.

    Raises:
        ValueError: both say it.
    """
    named = [flag for flag in flags if flag.startswith(("--optimise", "--optimize"))]
    if named and optimise != "auto":
        raise ValueError(f"optimise={optimise!r}: extra_flags say it too, with {named[0]!r}; leave one of them out")
    return "performance" if named else optimise


def _vela_flags(given: Options) -> list[str]:
    """Flags of the user's, and those for Direct Drive, where the CPU hands the commands to the NPU itself.

    Raises:
        ValueError: both say what kind of stream to write.
    """
    flags = list(given["extra_flags"] or [])
    if not given.get("direct_drive"):
        return flags
    for flag in flags:
        if flag.startswith(_DIRECT_DRIVE_NAMES):
            raise ValueError(f"direct_drive=True sets {' and '.join(_DIRECT_DRIVE_NAMES)}: leave {flag!r} out")
    return [*flags, *_DIRECT_DRIVE]


def _tosa(tosa_spec: str, given: Options) -> ArmCompileSpec:
    from arm_backend_core.targets.compile_spec import TosaCompileSpec

    return TosaCompileSpec(_with_extensions(tosa_spec, given))


def _vgf(tosa_spec: str, given: Options) -> ArmCompileSpec:
    from arm_backend_core.targets.compile_spec import VgfCompileSpec

    extended = _with_extensions(tosa_spec, given)
    if "mxfp" in extended.split("+"):
        raise ValueError("extensions: the VGF converter takes no block-scaled types ('mxfp'); TOSA_FP does")
    if "controlflow" in extended.split("+"):
        raise ValueError("extensions: the VGF converter takes no control flow ('cf'); torch.cond runs without it")
    return VgfCompileSpec(extended)


def _with_extensions(tosa_spec: str, given: Options) -> str:
    """With the extensions that the user adds.

    Raises:
        ValueError: TOSA has none of that name.
    """
    from arm_backend_core.targets.target import EXTENSIONS, SYNONYMS

    added = [SYNONYMS.get(name, name) for name in given["extensions"] or ()]
    added += ["mxfp"] * bool(given.get("mx"))
    for name in added:
        if name not in EXTENSIONS:
            near = get_close_matches(name.lower(), EXTENSIONS, n=1)
            hint = f"did you mean {near[0]!r}? " if near else ""
            raise ValueError(f"extensions: TOSA has no {name!r}; {hint}(allowed: {', '.join(EXTENSIONS)})")
    return "+".join(dict.fromkeys([*tosa_spec.split("+"), *added]))


_U55 = _ethos_u("ethos-u55", 128)
_U65 = _ethos_u("ethos-u65", 256)
_U85 = _ethos_u("ethos-u85", 256)
# int16 is needed in INT8 recipes too: softmax and layer_norm keep int16 tables and intermediates inside.
_INT = "TOSA-1.0+INT+int16"
# VGF runs what quantization left in floating point too.
_MIXED = "TOSA-1.0+INT+FP+int16"

#: What a recipe compiles for, by its name: its options -> a compile spec. The recipes that are supported are the keys.
SPECS: dict[str, Callable[[Options], ArmCompileSpec]] = {
    "ETHOSU_U55_INT8": _U55,
    "ETHOSU_U65_INT8": _U65,
    "ETHOSU_U85_INT8": _U85,
    "ETHOSU_U55_A8W4": _U55,
    "ETHOSU_U65_A8W4": _U65,
    "ETHOSU_U85_A8W4": _U85,
    "ETHOSU_U55_A16W8": _U55,
    "ETHOSU_U65_A16W8": _U65,
    "ETHOSU_U85_A16W8": _U85,
    "TOSA_FP": partial(_tosa, "TOSA-1.0+FP"),
    "TOSA_INT8": partial(_tosa, _INT),
    "TOSA_A8W4": partial(_tosa, f"{_INT}+int4"),
    "TOSA_A16W8": partial(_tosa, _INT),
    "VGF_FP": partial(_vgf, "TOSA-1.0+FP"),
    "VGF_INT8": partial(_vgf, _MIXED),
    "VGF_A8W4": partial(_vgf, f"{_MIXED}+int4"),
    "VGF_A16W8": partial(_vgf, _MIXED),
}


def recipe_name(given: str) -> str:
    """The name of a recipe that is written in any case, with ``-`` or ``_``.

    Raises:
        ValueError: there is none; the message names the nearest.
    """
    name = given.strip().upper().replace("-", "_").removeprefix("ARM_RECIPES_")
    if name in SPECS:
        return name
    near = get_close_matches(name, SPECS, n=1)
    hint = f"did you mean {near[0]}? " if near else ""
    raise ValueError(f"there is no recipe {given!r}; {hint}(allowed: {', '.join(SPECS)})")
