"""Recipe options: a table of keyword arguments, with accepted values, defaults, and the recipes that accept them."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sized
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from arm_backend_core.similar_names import format_suggestion, suggest_name
from arm_recipes.recipe import boards, input_dtype, precisions


@dataclass(frozen=True)
class Option:
    """A keyword argument of ``ExportRecipe.get_recipe``.

    Attributes:
        name: the keyword.
        group: recipes that take the option: "all", "int" (quantizing recipes), "tosa" (TOSA and VGF recipes),
            "tosa-fp" (``TOSA_FP``), "ethos-u", "ethos-u85", "cortex-m", or "cortex-m-cpu" (Cortex-M and Ethos-U
            recipes: in both, a Cortex-M may run int8 kernels).
        expects: the accepted values in words, for error messages.
        find_problem: returns the problem of a value, for the end of the message "got VALUE: PROBLEM"; None for a valid
            value.
        default: value of an omitted argument. None: the target determines the value, or the option has no effect.
    """

    name: str
    group: str
    expects: str
    find_problem: Callable[[Any], str | None]
    default: Any = None


def _bool_problem(value: Any) -> str | None:
    return None if isinstance(value, bool) else "not a bool"


def _bool_or_warn_problem(value: Any) -> str | None:
    return None if isinstance(value, bool) or value == "warn" else "none of these"


def _positive_int_problem(value: Any) -> str | None:
    # bool is a subclass of int: macs=True is an error, not 1.
    if isinstance(value, bool) or not isinstance(value, int):
        return "not an int"
    return None if value > 0 else "not positive"


def _name_problem(value: Any) -> str | None:
    if value is None:
        return None
    if not isinstance(value, str):
        return "not a str"
    return None if value.strip() else "empty"


def _board_problem(value: Any) -> str | None:
    return None if value is None else boards.find_problem(value)


def _flags_problem(value: Any) -> str | None:
    if value is None:
        return None
    if isinstance(value, str):
        return f"a single str; write extra_flags=[{value!r}]"
    if not isinstance(value, (list, tuple)) or not all(isinstance(flag, str) for flag in value):
        return "not a list of str"
    return None


def _extensions_problem(value: Any) -> str | None:
    if isinstance(value, str):
        return f"a single str; write extensions=[{value!r}]"
    if value is not None and not (isinstance(value, (list, tuple)) and all(isinstance(name, str) for name in value)):
        return "not a list of str"
    return None


def _mx_format_problem(value: Any) -> str | None:
    return None if value is None or value in MX_FORMATS else "none of these"


def _algorithms_problem(value: Any) -> str | None:
    if isinstance(value, bool):
        return None
    if not isinstance(value, (list, tuple, set, frozenset)):
        return "neither a bool nor a list of names"
    unknown = [name for name in value if name not in ALGORITHMS + OPT_IN_ALGORITHMS]
    return f"there is no algorithm {unknown[0]!r}" if unknown else None


def _observer_problem(value: Any) -> str | None:
    return None if value in OBSERVER_NAMES else "none of these"


def _goal_problem(value: Any) -> str | None:
    return None if value in GOALS else "none of these"


def resolve_algorithms(value: Any, recipe: str) -> tuple[str, ...]:
    """Return the names of the algorithms that the option value ``algorithms=value`` selects for a recipe."""
    if isinstance(value, bool):
        defaults = [
            name
            for name in ALGORITHMS
            if not (name in _COSTLY_NPU_ALGORITHMS and "ethos-u" in option_groups(recipe))
            and not (name in _NOT_ON_CORTEX_M and "cortex-m" in option_groups(recipe))
        ]
        return tuple(defaults) if value else ()
    return tuple(name for name in ALGORITHMS + OPT_IN_ALGORITHMS if name in value)


def _ini_problem(value: Any) -> str | None:
    if value is None or isinstance(value, (str, Path)):
        return None
    return "not a path"


def _directory_problem(value: Any) -> str | None:
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


def _calibration_problem(value: Any) -> str | None:
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


def _function_problem(value: Any) -> str | None:
    return None if value is None or callable(value) else "not callable"


_BYTE_UNITS = {"": 1, "B": 1, "KIB": 1024, "MIB": 1024**2, "KB": 1000, "MB": 1000**2}


def parse_bytes(value: int | str) -> int:
    """Parse a number of bytes, or a string such as ``512KiB`` or ``1.5 MB``.

    Raises:
        ValueError: the value is not a positive number of bytes.
    """
    if not isinstance(value, (int, str)) or isinstance(value, bool):
        raise ValueError("neither an int nor a str")
    match = re.fullmatch(r"(\d+(?:\.\d+)?) *([A-Za-z]*)", str(value).strip())
    if match is None or match[2].upper() not in _BYTE_UNITS:
        raise ValueError("not a number of bytes, of B, KiB, MiB, KB or MB")
    count = round(float(match[1]) * _BYTE_UNITS[match[2].upper()])
    if not count:
        raise ValueError("not positive")
    return count


def _decibels_problem(value: Any) -> str | None:
    if value is None:
        return None
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return None if is_number and value > 0 else "not a positive number"


def _steps_problem(value: Any) -> str | None:
    return None if value is None or value == "auto" else _positive_int_problem(value)


def _budget_problem(value: Any) -> str | None:
    try:
        return None if value is None or parse_bytes(value) else ""
    except ValueError as problem:
        return str(problem)


def _external_problem(value: Any) -> str | None:
    if isinstance(value, bool):
        return None
    if isinstance(value, str):
        return f"a single str; write external=[{value!r}]"
    if not isinstance(value, (list, tuple)):
        return "neither a bool nor a list of names"
    unknown = [name for name in value if name not in EXTERNAL_BLOCKS]
    return f"there is no block {unknown[0]!r}" if unknown else None


def resolve_external(value: Any) -> tuple[str, ...]:
    """Return the names of the blocks that ``external=value`` selects; an empty tuple for None or False."""
    if isinstance(value, bool) or value is None:
        return EXTERNAL_BLOCKS if value else ()
    return tuple(name for name in EXTERNAL_BLOCKS if name in value)


def _memory_problem(value: Any) -> str | None:
    if value is None:
        return None
    if not isinstance(value, Mapping):
        return "not a dict"
    if not value:
        return "it names no memory"
    for name, size in value.items():
        if not isinstance(name, str) or not re.fullmatch(r"[a-z][a-z0-9_]*", name):
            return f"{name!r} is no name of a memory: write lower-case letters, digits and _, such as 'sram'"
        if problem := _budget_problem(size):
            return f"the size of {name!r}, {size!r}, is {problem}"
    unlimited = [name for name, size in value.items() if size is None]
    if unlimited and unlimited[0] != list(value)[-1]:
        return f"{unlimited[0]!r} has no limit, so nothing is placed in the memories after it: put it last"
    return None


_EXPECTED_SAMPLES = "an iterable (list, DataLoader, ...), or a callable returning one, of tuples of input tensors"

_EXPECTED_PRECISIONS = 'a dict of precisions by module, such as {"head": "A16W8"}'

_EXPECTED_BUDGET = 'a number of bytes, or a text such as "512KiB"'

_EXPECTED_CPU = 'the name of a Cortex-M, "cortex-m55" for example, "auto", or None (Ethos-U recipes: no int8 kernels)'

#: Quantization algorithms that are applied by default, except those that ``resolve_algorithms`` excludes for a target.
ALGORITHMS = (
    "attention_scales",
    "bias_correction",
    "concat_scales",
    "cross_layer_equalization",
    "fused_norms",
    "fused_rms_norms",
    "int16_angles",
    "int16_coordinates",
    "int16_outputs",
)
#: Quantization algorithms that are applied only if the option ``algorithms`` names them.
OPT_IN_ALGORITHMS = ("gptq",)
#: Algorithms that add more than 2 % to an NPU's cycles. Ethos-U recipes apply them only if ``algorithms`` names them.
_COSTLY_NPU_ALGORITHMS = ("fused_rms_norms",)
#: Algorithms whose results ``cortex_m`` operators do not support: these operators do not compute in int16, and the
#: result of their softmax has the fixed scale 1/256. ``CORTEX_M_INT8`` applies these algorithms only if ``algorithms``
#: names them.
_NOT_ON_CORTEX_M = ("attention_scales", "int16_angles", "int16_coordinates", "int16_outputs")

#: Element types of OCP MX blocks of 32 channels, see ``arm_backend_core.ops.block_scaled``.
MX_FORMATS = ("fp8e4m3", "fp8e5m2", "fp6e2m3", "fp6e3m2", "fp4e2m1")

#: Optimization goals of Ethos-U programs. "performance" (fewest cycles) and "size" (least SRAM) are Vela's goals. "ram"
#: searches for the program with the least RAM. "auto" compiles for performance and for size, and takes the better
#: program (``arm_backend_core.alternatives.size_or_speed``).
GOALS = ("auto", "performance", "size", "ram")

#: Blocks of Ethos-U delegates that the option ``external`` moves to a data file (``.ptd``).
EXTERNAL_BLOCKS = ("weights", "commands")

#: Names of the observers in ``arm_recipes.recipe.observers``.
OBSERVER_NAMES = ("mse", "minmax", "percentile", "entropy")

_EXPECTED_MEMORY = 'a dict of memories, the fastest first, with sizes: {"sram": "256KiB", "dram": None}'
_EXPECTED_EXTERNAL = f"a bool, or a list of names of {', '.join(EXTERNAL_BLOCKS)}"
_EXPECTED_ALGORITHMS = f"a bool, or a list of names of {', '.join(ALGORITHMS + OPT_IN_ALGORITHMS)}"

OPTIONS: dict[str, Option] = {
    option.name: option
    for option in (
        Option("board", "ethos-u", "the name of a board", _board_problem),
        Option("macs", "ethos-u", "an int that the family has", _positive_int_problem),
        Option("system_config", "ethos-u", "the name of a [System_Config] in the .ini", _name_problem),
        Option("memory_mode", "ethos-u", "the name of a [Memory_Mode] in the .ini", _name_problem),
        Option("extra_flags", "ethos-u", "a list of Vela command line flags", _flags_problem),
        Option("config_ini", "ethos-u", "the path of a Vela .ini file", _ini_problem),
        Option("search_alternatives", "ethos-u", "a bool", _bool_problem, default=True),
        Option("optimise", "ethos-u", f"one of {', '.join(map(repr, GOALS))}", _goal_problem, default="auto"),
        Option("sram_budget", "cortex-m-cpu", _EXPECTED_BUDGET, _budget_problem),
        Option("flash_budget", "cortex-m-cpu", _EXPECTED_BUDGET, _budget_problem),
        Option("memory", "ethos-u", _EXPECTED_MEMORY, _memory_problem),
        Option("shared_scratch", "ethos-u", "a bool", _bool_problem, default=True),
        Option("external", "ethos-u", _EXPECTED_EXTERNAL, _external_problem, default=False),
        Option("direct_drive", "ethos-u85", "a bool", _bool_problem, default=False),
        Option("cpu", "cortex-m-cpu", _EXPECTED_CPU, _name_problem, default="auto"),
        Option("isa", "cortex-m", '"mve", "dsp", "scalar", or None for the fastest', _name_problem),
        Option("extensions", "tosa", 'a list of names of TOSA extensions, such as ["bf16"]', _extensions_problem),
        Option("mx", "tosa-fp", f"one of {', '.join(map(repr, MX_FORMATS))}", _mx_format_problem),
        Option("per_channel", "int", "a bool", _bool_problem, default=True),
        Option("precisions", "int", _EXPECTED_PRECISIONS, precisions.find_problem),
        Option("calibration_samples", "int", _EXPECTED_SAMPLES, _calibration_problem),
        Option("observer", "int", f"one of {', '.join(map(repr, OBSERVER_NAMES))}", _observer_problem, default="mse"),
        Option("algorithms", "int", _EXPECTED_ALGORITHMS, _algorithms_problem, default=True),
        Option("qat", "int", "a function that trains the model that it is given", _function_problem),
        Option("min_sqnr", "int", "a number of dB", _decibels_problem),
        Option("quantized_io", "int", "a bool", _bool_problem, default=False),
        Option("input_dtype", "int", '"uint8", or None', input_dtype.find_problem),
        Option("steps_per_call", "all", 'an int, "auto", or None for all', _steps_problem, default="auto"),
        Option("plan_inputs", "all", "a bool", _bool_problem, default=True),
        Option("plan_outputs", "all", "a bool", _bool_problem, default=True),
        Option("require_full_delegation", "all", "a bool", _bool_problem, default=False),
        Option("require_runnable", "all", 'True, False or "warn"', _bool_or_warn_problem, default="warn"),
        Option("dump_dir", "all", "a directory for intermediate artefacts", _directory_problem),
    )
}


#: Current names of options that were renamed before the first release, by old name; for error messages.
OLD_OPTION_NAMES = {
    "calibration": "calibration_samples",
    "improve": "algorithms",
    "tuning": "search_alternatives",
}


def option_groups(recipe: str) -> frozenset[str]:
    """The option groups of a recipe, by its name."""
    names = {"all"}
    if not recipe.endswith("_FP"):
        names.add("int")
    if recipe.startswith("ETHOSU"):
        names |= {"ethos-u", "cortex-m-cpu"}
    elif recipe.startswith("CORTEX_M"):
        names |= {"cortex-m", "cortex-m-cpu"}
    else:
        names.add("tosa")
    if recipe == "TOSA_FP":
        names.add("tosa-fp")
    if recipe.startswith("ETHOSU_U85"):
        names.add("ethos-u85")
    return frozenset(names)


#: Keywords of ``export``. If one is passed to a recipe, the error message says that it belongs to ``export``.
EXPORT_ARGUMENTS = {
    *("samples", "labels", "metric", "output", "dynamic_shapes", "sizes", "constant_methods", "strict"),
    *("channels_last", "verify", "cache_dir", "progress"),
}


def option_names(recipe: str) -> list[str]:
    """Names of the options of a recipe, in the order of ``OPTIONS``."""
    return [option.name for option in OPTIONS.values() if option.group in option_groups(recipe)]


def resolve_options(recipe: str, user_options: Mapping[str, Any]) -> dict[str, Any]:
    """Validate the options of a recipe, and add the options of its board and the defaults.

    Raises:
        ValueError: the recipe has no such option (the message suggests the nearest name), a value is invalid, options
            contradict each other, or the board has another NPU family or number of MACs.
    """
    names = option_names(recipe)
    for name, value in user_options.items():
        if name not in names:
            raise ValueError(_unknown_option_message(recipe, name, names))
        problem = OPTIONS[name].find_problem(value)
        if problem is not None:
            expects = OPTIONS[name].expects
            raise ValueError(f"{recipe}: {name} must be {expects}; got {_format_value(value)}: {problem}")
    checked = {name: user_options.get(name, OPTIONS[name].default) for name in names}
    if checked.get("input_dtype") is not None:
        input_dtype.check_input_dtype(recipe, user_options)
        checked["quantized_io"] = True
    if checked.get("board") is None:
        return checked
    return boards.add_board_options(f"ethos-{recipe.split('_')[1].lower()}", checked)


def _unknown_option_message(recipe: str, name: str, names: list[str]) -> str:
    if name in OPTIONS:
        kinds = {"ethos-u": "Ethos-U", "ethos-u85": "Ethos-U85", "int": "quantizing", "tosa": "TOSA and VGF"}
        kinds |= {"tosa-fp": "TOSA_FP", "cortex-m": "Cortex-M", "cortex-m-cpu": "Cortex-M and Ethos-U"}
        hint = f"; it belongs to {kinds[OPTIONS[name].group]} recipes"
    elif name in EXPORT_ARGUMENTS:
        hint = "; it belongs to export(model, recipe, samples, ...)"
    else:
        renamed = OLD_OPTION_NAMES.get(name)
        hint = suggest_name(name, names) if renamed is None else format_suggestion([renamed])
    return f"{recipe}: unknown argument '{name}'{hint} (allowed: {', '.join(names)})"


def _format_value(value: Any) -> str:
    text = repr(value) if not _is_tensor(value) else f"tensor of shape {tuple(value.shape)}"
    return text if len(text) <= 80 else text[:77] + "..."


def _is_tensor(value: Any) -> bool:
    # A tensor exists only if PyTorch is imported already. So the command line need not import PyTorch for this check.
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)
