"""Recipe options: one table of the keyword arguments with accepted values, defaults, and the recipes that take them."""

from __future__ import annotations

import difflib
import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sized
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from arm_recipes.recipe import boards, precisions


@dataclass(frozen=True)
class Option:
    """A keyword argument of ``ExportRecipe.get_recipe``.

    Attributes:
        name: the keyword.
        group: recipes that take the option: "all", "int" (quantizing recipes), "tosa" (TOSA and VGF recipes),
            "tosa-fp", "ethos-u" or "ethos-u85".
        expects: the accepted values in words, for error messages.
        find_problem: describes the problem of a value (completes "got <value>: ..."); None for a valid value.
        default: value if the argument is omitted; None means the target's default.
    """

    name: str
    group: str
    expects: str
    find_problem: Callable[[Any], str | None]
    default: Any = None


def _is_bool(value: Any) -> str | None:
    return None if isinstance(value, bool) else "not a bool"


def _is_bool_or_warn(value: Any) -> str | None:
    return None if isinstance(value, bool) or value == "warn" else "none of these"


def _is_macs(value: Any) -> str | None:
    # bool is a subclass of int: macs=True is an error, not one MAC.
    if isinstance(value, bool) or not isinstance(value, int):
        return "not an int"
    return None if value > 0 else "not positive"


def _is_name(value: Any) -> str | None:
    if value is None:
        return None
    if not isinstance(value, str):
        return "not a str"
    return None if value.strip() else "empty"


def _is_board(value: Any) -> str | None:
    return None if value is None else boards.find_problem(value)


def _is_flags(value: Any) -> str | None:
    if value is None:
        return None
    if isinstance(value, str):
        return f"a single str; write extra_flags=[{value!r}]"
    if not isinstance(value, (list, tuple)) or not all(isinstance(flag, str) for flag in value):
        return "not a list of str"
    return None


def _is_names(value: Any) -> str | None:
    if isinstance(value, str):
        return f"a single str; write extensions=[{value!r}]"
    if value is not None and not (isinstance(value, (list, tuple)) and all(isinstance(name, str) for name in value)):
        return "not a list of str"
    return None


def _is_format(value: Any) -> str | None:
    return None if value is None or value in MX_FORMATS else "none of these"


def _is_algorithms(value: Any) -> str | None:
    if isinstance(value, bool):
        return None
    if not isinstance(value, (list, tuple, set, frozenset)):
        return "neither a bool nor a list of names"
    unknown = [name for name in value if name not in ALGORITHMS + OPT_IN_ALGORITHMS]
    return f"there is no algorithm {unknown[0]!r}" if unknown else None


def _is_observer(value: Any) -> str | None:
    return None if value in OBSERVER_NAMES else "none of these"


def _is_goal(value: Any) -> str | None:
    return None if value in GOALS else "none of these"


def resolve_algorithms(value: Any, recipe: str) -> tuple[str, ...]:
    """The algorithm names that a value of ``algorithms`` selects for a recipe."""
    if isinstance(value, bool):
        defaults = [name for name in ALGORITHMS if not (name in _COSTLY_ON_NPU and "ethos-u" in groups(recipe))]
        return tuple(defaults) if value else ()
    return tuple(name for name in ALGORITHMS + OPT_IN_ALGORITHMS if name in value)


def _is_ini(value: Any) -> str | None:
    if value is None or isinstance(value, (str, Path)):
        return None
    return "not a path"


def _is_directory(value: Any) -> str | None:
    if value is None:
        return None
    if not isinstance(value, (str, Path)):
        return "not a path"
    path = Path(value).absolute()
    # The directory may not exist yet and is not created here: check the nearest ancestor that exists.
    existing = next(parent for parent in (path, *path.parents) if parent.exists())
    if not existing.is_dir():
        return f"'{existing}' is not a directory"
    return None if os.access(existing, os.W_OK) else f"'{existing}' cannot be written"


def _is_calibration(value: Any) -> str | None:
    if value is None or callable(value):
        return None
    if _is_tensor(value):
        return "a single tensor; write calibration_samples=[(tensor,)]"
    if isinstance(value, Mapping):
        return "a dict; give samples per method to export() as samples={'method': [...]}"
    if isinstance(value, (str, bytes)) or not isinstance(value, Iterable):
        return "not iterable"
    if isinstance(value, Sized) and len(value) == 0:
        return "it has no samples"
    return None


def _is_function(value: Any) -> str | None:
    return None if value is None or callable(value) else "not callable"


_UNITS = {"": 1, "B": 1, "KIB": 1024, "MIB": 1024**2, "KB": 1000, "MB": 1000**2}


def parse_bytes(value: int | str) -> int:
    """Parse a number of bytes, or a string such as ``512KiB`` or ``1.5 MB``.

    Raises:
        ValueError: the value is not a positive number of bytes.
    """
    if not isinstance(value, (int, str)) or isinstance(value, bool):
        raise ValueError("neither an int nor a str")
    match = re.fullmatch(r"(\d+(?:\.\d+)?) *([A-Za-z]*)", str(value).strip())
    if match is None or match[2].upper() not in _UNITS:
        raise ValueError("not a number of bytes, of B, KiB, MiB, KB or MB")
    count = round(float(match[1]) * _UNITS[match[2].upper()])
    if not count:
        raise ValueError("not positive")
    return count


def _is_decibels(value: Any) -> str | None:
    if value is None:
        return None
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return None if number and value > 0 else "not a positive number"


def _is_steps(value: Any) -> str | None:
    return None if value is None or value == "auto" else _is_macs(value)


def _is_budget(value: Any) -> str | None:
    try:
        return None if value is None or parse_bytes(value) else ""
    except ValueError as problem:
        return str(problem)


_CALIBRATION = "an iterable (list, DataLoader, ...), or a callable returning one, of tuples of input tensors"

_PRECISIONS = 'a dict of precisions by module, such as {"head": "A16W8"}'

_BUDGET = 'a number of bytes, or a text such as "512KiB"'

#: Quantization algorithms beyond rounding to calibrated ranges: those applied by default, and those that must be named.
ALGORITHMS = (
    "bias_correction",
    "concat_scales",
    "cross_layer_equalization",
    "fused_norms",
    "fused_rms_norms",
    "int16_angles",
    "int16_attention",
    "int16_outputs",
)
OPT_IN_ALGORITHMS = ("gptq",)
#: Algorithms that cost an NPU more than 2 % more cycles. Ethos-U recipes apply them only if they are named.
_COSTLY_ON_NPU = ("fused_rms_norms",)

#: Element types of OCP MX blocks of 32 channels, see ``arm_backend_core.ops.block_scaled``.
MX_FORMATS = ("fp8e4m3", "fp8e5m2", "fp6e2m3", "fp6e3m2", "fp4e2m1")

#: Optimization goals of Ethos-U programs: "performance" minimizes cycles, "size" minimizes SRAM, "auto" tries both.
GOALS = ("auto", "performance", "size")

#: Names of the observers in ``arm_recipes.recipe.observers``.
OBSERVER_NAMES = ("mse", "minmax", "percentile", "entropy")

_ALGORITHM_NAMES = f"a bool, or a list of names of {', '.join(ALGORITHMS + OPT_IN_ALGORITHMS)}"

OPTIONS: dict[str, Option] = {
    option.name: option
    for option in (
        Option("board", "ethos-u", "the name of a board", _is_board),
        Option("macs", "ethos-u", "an int that the family has", _is_macs),
        Option("system_config", "ethos-u", "the name of a [System_Config] in the .ini", _is_name),
        Option("memory_mode", "ethos-u", "the name of a [Memory_Mode] in the .ini", _is_name),
        Option("extra_flags", "ethos-u", "a list of Vela command line flags", _is_flags),
        Option("config_ini", "ethos-u", "the path of a Vela .ini file", _is_ini),
        Option("search_alternatives", "ethos-u", "a bool", _is_bool, default=True),
        Option("optimise", "ethos-u", f"one of {', '.join(map(repr, GOALS))}", _is_goal, default="auto"),
        Option("sram_budget", "ethos-u", _BUDGET, _is_budget),
        Option("flash_budget", "ethos-u", _BUDGET, _is_budget),
        Option("direct_drive", "ethos-u85", "a bool", _is_bool, default=False),
        Option("extensions", "tosa", 'a list of names of TOSA extensions, such as ["bf16"]', _is_names),
        Option("mx", "tosa-fp", f"one of {', '.join(map(repr, MX_FORMATS))}", _is_format),
        Option("per_channel", "int", "a bool", _is_bool, default=True),
        Option("precisions", "int", _PRECISIONS, precisions.find_problem),
        Option("calibration_samples", "int", _CALIBRATION, _is_calibration),
        Option("observer", "int", f"one of {', '.join(map(repr, OBSERVER_NAMES))}", _is_observer, default="mse"),
        Option("algorithms", "int", _ALGORITHM_NAMES, _is_algorithms, default=True),
        Option("qat", "int", "a function that trains the model that it is given", _is_function),
        Option("min_sqnr", "int", "a number of dB", _is_decibels),
        Option("quantized_io", "int", "a bool", _is_bool, default=False),
        Option("steps_per_call", "all", 'an int, "auto", or None for all', _is_steps, default="auto"),
        Option("require_full_delegation", "all", "a bool", _is_bool, default=False),
        Option("require_runnable", "all", 'True, False or "warn"', _is_bool_or_warn, default="warn"),
        Option("dump_dir", "all", "a directory for intermediate artefacts", _is_directory),
    )
}


#: Old name of an option, from before the first release -> current name, for error messages.
RENAMED = {
    "calibration": "calibration_samples",
    "improve": "algorithms",
    "tuning": "search_alternatives",
}


def groups(recipe: str) -> frozenset[str]:
    """The option groups of a recipe, by its name."""
    names = {"all"}
    if not recipe.endswith("_FP"):
        names.add("int")
    if recipe.startswith("ETHOSU"):
        names.add("ethos-u")
    else:
        names.add("tosa")
    if recipe == "TOSA_FP":
        names.add("tosa-fp")
    if recipe.startswith("ETHOSU_U85"):
        names.add("ethos-u85")
    return frozenset(names)


def allowed(recipe: str) -> list[str]:
    """Names of the options of a recipe, in the order of ``OPTIONS``."""
    return [option.name for option in OPTIONS.values() if option.group in groups(recipe)]


def check(recipe: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Validate the options of a recipe, and add those of its board and the defaults.

    Raises:
        ValueError: the recipe has no such option (the message suggests the nearest name), a value is invalid, or the
            board has another NPU.
    """
    names = allowed(recipe)
    for name, value in given.items():
        if name not in names:
            raise ValueError(_unknown(recipe, name, names))
        problem = OPTIONS[name].find_problem(value)
        if problem is not None:
            expects = OPTIONS[name].expects
            raise ValueError(f"{recipe}: {name} must be {expects}; got {_short(value)}: {problem}")
    checked = {name: given.get(name, OPTIONS[name].default) for name in names}
    if checked.get("board") is None:
        return checked
    return boards.add_board_options(f"ethos-{recipe.split('_')[1].lower()}", checked)


def _unknown(recipe: str, name: str, names: list[str]) -> str:
    if name in OPTIONS:
        kinds = {"ethos-u": "Ethos-U", "ethos-u85": "Ethos-U85", "int": "quantizing", "tosa": "TOSA and VGF"}
        kinds["tosa-fp"] = "TOSA_FP"
        hint = f"; it belongs to {kinds[OPTIONS[name].group]} recipes"
    else:
        near = [RENAMED[name]] if name in RENAMED else difflib.get_close_matches(name.lower(), names, n=1, cutoff=0.5)
        hint = f"; did you mean '{near[0]}'?" if near else ""
    return f"{recipe}: unknown argument '{name}'{hint} (allowed: {', '.join(names)})"


def _short(value: Any) -> str:
    text = repr(value) if not _is_tensor(value) else f"tensor of shape {tuple(value.shape)}"
    return text if len(text) <= 80 else text[:77] + "..."


def _is_tensor(value: Any) -> bool:
    # If the value is a tensor, PyTorch is imported. The command line does not import PyTorch here.
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)
