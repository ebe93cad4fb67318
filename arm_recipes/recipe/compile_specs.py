"""Compile specs of the recipes, by recipe name. Importing this module does not import PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from arm_backend_core.similar_names import suggest_name
from arm_recipes.recipe import options
from arm_recipes.recipe.profiles import TOSA_SPECS

if TYPE_CHECKING:
    from arm_backend_core.targets.compile_spec import ArmCompileSpec
    from arm_backend_core.targets.cortex_m import Processor

Options = dict[str, Any]
#: Vela flags for Direct Drive. They select a COP2 command stream, which the NPU's Linux driver expects, and separate
#: memory regions for inputs and outputs.
_DIRECT_DRIVE_FLAGS = ("--cop-format=COP2", "--separate-io-regions")
_DIRECT_DRIVE_NAMES = tuple(flag.partition("=")[0] for flag in _DIRECT_DRIVE_FLAGS)


def _ethos_u_spec_builder(family: str, default_macs: int) -> Callable[[Options], ArmCompileSpec]:
    def build(values: Options) -> ArmCompileSpec:
        from arm_backend_core.targets import vela_config
        from arm_backend_core.targets.compile_spec import EthosUCompileSpec

        macs, allowed = values["macs"] or default_macs, vela_config.list_macs(family)
        if macs not in allowed:
            nearest = min(allowed, key=lambda count: abs(count - macs))
            raise ValueError(
                f"macs={macs}: no {family} has that many; did you mean {nearest}? "
                f"(allowed: {', '.join(map(str, allowed))})"
            )
        flags = _vela_flags(values)
        spec = EthosUCompileSpec(
            f"{family}-{macs}",
            system_config=values["system_config"],
            memory_mode=values["memory_mode"],
            extra_flags=flags or None,
            config_ini=None if values["config_ini"] is None else str(values["config_ini"]),
            search_alternatives=values["search_alternatives"],
            optimise=_optimization_goal(values["optimise"], flags),
            cpu=_host_cpu(family, values),
        )
        budget = values["sram_budget"]
        spec.sram_budget = None if budget is None else options.parse_bytes(budget)
        return spec

    return build


def _host_cpu(family: str, values: Options) -> str | None:
    """Return the host CPU: the Cortex-M whose int8 kernels run the quantized operators outside of delegates.

    Returns:
        Name of the Cortex-M. None: these operators compute in floating point. None is the default if the CPU beside
        the NPU runs Linux (Ethos-U65, Direct Drive).
    """
    from arm_backend_core.targets.cortex_m import DEFAULT_HOST_CPU

    if values["cpu"] != "auto":
        cpu: str | None = values["cpu"]
        return cpu
    return None if values.get("direct_drive") else DEFAULT_HOST_CPU[family]


def _optimization_goal(optimise: str, flags: Sequence[str]) -> str:
    """Return the argument ``optimise`` of the compile spec.

    If ``extra_flags`` contain ``--optimise``, returns "performance", and the spec reads the goal from the flag.

    Raises:
        ValueError: ``optimise`` and ``extra_flags`` both set the goal.
    """
    named = [flag for flag in flags if flag.startswith(("--optimise", "--optimize"))]
    if named and optimise != "auto":
        raise ValueError(f"optimise={optimise!r}: extra_flags also set it, with {named[0]!r}; remove one of them")
    return "performance" if named else optimise


def _vela_flags(values: Options) -> list[str]:
    """Vela flags: the user's ``extra_flags`` and the flags of Direct Drive.

    With Direct Drive, the application CPU submits the command stream to the NPU.

    Raises:
        ValueError: ``extra_flags`` contain a flag that Direct Drive sets.
    """
    flags = list(values["extra_flags"] or [])
    if not values.get("direct_drive"):
        return flags
    for flag in flags:
        if flag.startswith(_DIRECT_DRIVE_NAMES):
            raise ValueError(f"direct_drive=True sets {' and '.join(_DIRECT_DRIVE_NAMES)}: remove {flag!r}")
    return [*flags, *_DIRECT_DRIVE_FLAGS]


def _build_tosa_spec(tosa_spec: str, values: Options) -> ArmCompileSpec:
    from arm_backend_core.targets.compile_spec import TosaCompileSpec

    return TosaCompileSpec(_add_extensions(tosa_spec, values))


def _build_vgf_spec(tosa_spec: str, values: Options) -> ArmCompileSpec:
    from arm_backend_core.targets.compile_spec import VgfCompileSpec

    extended = _add_extensions(tosa_spec, values)
    if "mxfp" in extended.split("+"):
        raise ValueError("extensions: the VGF converter does not support block-scaled types ('mxfp'); use TOSA_FP")
    if "controlflow" in extended.split("+"):
        raise ValueError(
            "extensions: the VGF converter does not support control flow ('cf'); torch.cond does not need "
            "it: both branches are computed and a SELECT chooses the result"
        )
    return VgfCompileSpec(extended)


def _add_extensions(tosa_spec: str, values: Options) -> str:
    """Add the extensions of the options ``extensions`` and ``mx`` to a TOSA specification string.

    Raises:
        ValueError: TOSA has no extension with that name.
    """
    from arm_backend_core.targets.target import EXTENSION_SYNONYMS, EXTENSIONS

    added = [EXTENSION_SYNONYMS.get(name, name) for name in values["extensions"] or ()]
    added += ["mxfp"] * bool(values.get("mx"))
    for name in added:
        if name not in EXTENSIONS:
            suggestion = suggest_name(name, EXTENSIONS)
            raise ValueError(f"extensions: TOSA has no {name!r}{suggestion} (allowed: {', '.join(EXTENSIONS)})")
    return "+".join(dict.fromkeys([*tosa_spec.split("+"), *added]))


def _build_cortex_m_spec(values: Options) -> ArmCompileSpec:
    from arm_backend_core.targets.compile_spec import CortexMCompileSpec

    processor = recipe_processor("CORTEX_M_INT8", values)
    assert processor is not None
    return CortexMCompileSpec(processor.cpu, processor.isa)


def recipe_processor(recipe: str, values: Options) -> Processor | None:
    """Return the Cortex-M that runs a recipe's int8 kernels: the target, or the CPU beside the NPU.

    Returns None if the recipe uses no int8 kernels.

    Args:
        recipe: name of the recipe.
        values: validated options of the recipe, with defaults.

    Raises:
        ValueError: there is no such processor, or it does not have the instruction set.
    """
    from arm_backend_core.targets.cortex_m import DEFAULT_CPU, Processor

    if recipe.startswith("CORTEX_M"):
        return Processor.resolve(DEFAULT_CPU if values["cpu"] == "auto" else values["cpu"], values["isa"])
    cpu = _host_cpu(f"ethos-{recipe.split('_')[1].lower()}", values) if recipe.startswith("ETHOSU") else None
    return None if cpu is None else Processor.resolve(cpu)


_build_u55_spec = _ethos_u_spec_builder("ethos-u55", 128)
_build_u65_spec = _ethos_u_spec_builder("ethos-u65", 256)
_build_u85_spec = _ethos_u_spec_builder("ethos-u85", 256)

#: Function that builds the compile spec of each recipe from the option values. The keys are the supported recipes.
SPEC_BUILDERS: dict[str, Callable[[Options], ArmCompileSpec]] = {
    "ETHOSU_U55_INT8": _build_u55_spec,
    "ETHOSU_U65_INT8": _build_u65_spec,
    "ETHOSU_U85_INT8": _build_u85_spec,
    "ETHOSU_U55_A8W4": _build_u55_spec,
    "ETHOSU_U65_A8W4": _build_u65_spec,
    "ETHOSU_U85_A8W4": _build_u85_spec,
    "ETHOSU_U55_A16W8": _build_u55_spec,
    "ETHOSU_U65_A16W8": _build_u65_spec,
    "ETHOSU_U85_A16W8": _build_u85_spec,
    "CORTEX_M_INT8": _build_cortex_m_spec,
    "TOSA_FP": partial(_build_tosa_spec, TOSA_SPECS["TOSA_FP"]),
    "TOSA_INT8": partial(_build_tosa_spec, TOSA_SPECS["TOSA_INT8"]),
    "TOSA_A8W4": partial(_build_tosa_spec, TOSA_SPECS["TOSA_A8W4"]),
    "TOSA_A16W8": partial(_build_tosa_spec, TOSA_SPECS["TOSA_A16W8"]),
    "VGF_FP": partial(_build_vgf_spec, TOSA_SPECS["VGF_FP"]),
    "VGF_INT8": partial(_build_vgf_spec, TOSA_SPECS["VGF_INT8"]),
    "VGF_A8W4": partial(_build_vgf_spec, TOSA_SPECS["VGF_A8W4"]),
    "VGF_A16W8": partial(_build_vgf_spec, TOSA_SPECS["VGF_A16W8"]),
}


def normalize_recipe_name(name: str) -> str:
    """Return a recipe's name in upper case with ``_`` for ``-``, and without the prefix ``ARM_RECIPES_``.

    Raises:
        ValueError: there is no such recipe; the message suggests the nearest name.
    """
    normalized = name.strip().upper().replace("-", "_").removeprefix("ARM_RECIPES_")
    if normalized in SPEC_BUILDERS:
        return normalized
    allowed = ", ".join(SPEC_BUILDERS)
    raise ValueError(f"there is no recipe {name!r}{suggest_name(normalized, SPEC_BUILDERS)} (allowed: {allowed})")
