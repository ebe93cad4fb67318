"""Arguments shared by several commands: argparse definitions and parsing."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from arm_recipes._internal.conversions import dtype_name
from arm_recipes._internal.files import check_saved_program
from arm_recipes.cli.parser import OPTION_GROUP_TITLES, OUTPUT, SAMPLES, Parser
from arm_recipes.cli.samples import (
    DYNAMIC_SIZE,
    ImageNormalization,
    check_returned_samples,
    check_source,
    is_function,
    read_samples,
)
from arm_recipes.recipe import options
from arm_recipes.recipe.compile_specs import SPEC_BUILDERS, normalize_recipe_name
from arm_recipes.recipe.saved_recipe import read_saved_recipe

if TYPE_CHECKING:
    from executorch.export import ExportRecipe
    from torch.export import ExportedProgram

    from arm_recipes.runtime.program import Program
    from arm_recipes.runtime.tensor_info import TensorInfo

    Commands = argparse._SubParsersAction[Parser]


class MergeDicts(argparse.Action):
    """Action of a repeatable argument: merges the dicts of all its occurrences."""

    def __call__(  # noqa: D102 (argparse calls it)
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option_string: Any = None
    ) -> None:
        setattr(namespace, self.dest, {**(getattr(namespace, self.dest, None) or {}), **values})


def parse_precision(text: str) -> dict[str, str]:
    """Parse MODULE=NAME, the precision of a module, as {MODULE: NAME}."""
    module, equals, name = text.rpartition("=")
    if not equals:
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form MODULE=NAME")
    return {module: name}


def parse_sizes(text: str) -> dict[str, list[int]]:
    """Parse the sizes of a dynamic dimension: NAME=SIZE,SIZE."""
    name, _, sizes = text.partition("=")
    try:
        return {name.strip(): [int(size) for size in sizes.split(",")]}
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form NAME=SIZE,SIZE, such as x_0=1,8") from None


def parse_steps(text: str) -> int | str:
    """Parse the steps per call: a number, "auto", or "all". For "all", return ``sys.maxsize``."""
    try:
        return text if text == "auto" else sys.maxsize if text == "all" else int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number, auto or all") from None


def parse_cpu(text: str) -> str | None:
    """Parse the name of a processor; return None for "none"."""
    return None if text == "none" else text


def parse_memory(text: str) -> dict[str, str | None]:
    """Parse NAME=SIZE as {NAME: SIZE}, and NAME alone (a memory without a size limit) as {NAME: None}."""
    name, equals, size = text.partition("=")
    return {name.strip(): size.strip() if equals else None}


#: {recipe option: command-line flag}, for flags that are not named after the option.
_FLAG_NAMES = {
    "extensions": "--extension",
    "per_channel": "--per-tensor",
    "precisions": "--precision",
    "search_alternatives": "--no-search-alternatives",
    "shared_scratch": "--no-shared-scratch",
    "plan_inputs": "--no-plan-inputs",
    "plan_outputs": "--no-plan-outputs",
}
_BUDGET_HELP = "fail if the program needs more {}: bytes, or a text such as 512KiB"
#: {recipe option: keyword arguments of ``add_argument``}.
_ARGPARSE_KEYWORDS: dict[str, dict[str, Any]] = {
    "board": {"metavar": "NAME", "help": "compile for this board; list them with 'arm-recipes boards'"},
    "macs": {"type": int, "metavar": "N", "help": "MACs per cycle of the NPU; default: the recipe's"},
    "system_config": {"metavar": "NAME", "help": "[System_Config] of the Vela .ini; default: the recipe's"},
    "memory_mode": {"metavar": "NAME", "help": "[Memory_Mode] of the Vela .ini; default: the recipe's"},
    "config_ini": {"metavar": "FILE", "help": "use this Vela .ini file; default: Vela's"},
    "optimise": {"metavar": "GOAL", "help": f"optimize for {', '.join(options.GOALS)}; default: auto"},
    "sram_budget": {"metavar": "BYTES", "help": _BUDGET_HELP.format("SRAM")},
    "flash_budget": {"metavar": "BYTES", "help": _BUDGET_HELP.format("flash")},
    "memory": {
        "type": parse_memory,
        "action": MergeDicts,
        "metavar": "NAME=SIZE",
        "help": "place inputs, outputs and CPU tensors in this memory, such as sram=256KiB; repeat, the fastest first",
    },
    "shared_scratch": {"action": "store_false", "help": "keep the NPU's scratch out of planned memory"},
    "plan_inputs": {"action": "store_false", "help": "leave the memory of the inputs to the application"},
    "plan_outputs": {"action": "store_false", "help": "leave the memory of the outputs to the application"},
    "external": {
        "nargs": "+",
        "metavar": "BLOCK",
        "help": f"write blocks to a data file beside the program, model.ptd: {', '.join(options.EXTERNAL_BLOCKS)}",
    },
    "direct_drive": {
        "action": "store_true",
        "help": "compile for Linux on a Cortex-A that submits commands to the NPU itself (Ethos-U85)",
    },
    "cpu": {"type": parse_cpu, "metavar": "NAME", "help": "Cortex-M, such as cortex-m55; none: no int8 kernels"},
    "isa": {"metavar": "NAME", "help": "instruction set of the kernels: mve, dsp, scalar; default: the processor's"},
    "mx": {"metavar": "FORMAT", "help": f"use this MX format (TOSA_FP): {', '.join(options.MX_FORMATS)}"},
    "observer": {"metavar": "NAME", "help": f"range observer: {', '.join(options.OBSERVER_NAMES)}; default: mse"},
    "quantized_io": {
        "action": "store_true",
        "help": "take and return quantized integers, without quantize and dequantize at the boundary",
    },
    "input_dtype": {"metavar": "NAME", "help": "uint8: take uint8 inputs, with --quantized-io; default: int8 or int16"},
    "require_full_delegation": {"action": "store_true", "help": "fail if an operator stays on the CPU"},
    "dump_dir": {"metavar": "FOLDER", "help": "write intermediate artifacts to this folder"},
    "extra_flags": {"action": "append", "metavar": "FLAG", "help": "pass a flag to Vela; repeat for several"},
    "extensions": {"action": "append", "metavar": "NAME", "help": "enable a TOSA extension; repeat for several"},
    "precisions": {
        "type": parse_precision,
        "action": MergeDicts,
        "metavar": "MODULE=NAME",
        "help": "set the precision of a module, such as head=A16W8; repeat for several; default: the recipe's",
    },
    "per_channel": {"action": "store_false", "help": "use one scale per weight tensor instead of one per channel"},
    "search_alternatives": {"action": "store_false", "help": "use the default alternatives, without Vela's estimates"},
    "algorithms": {
        "nargs": "*",
        "metavar": "NAME",
        "help": "enable only these quantization algorithms; without names, none; default: "
        f"{', '.join(options.ALGORITHMS)}",
    },
    "min_sqnr": {"type": float, "metavar": "DB", "help": "require this output SQNR, in dB"},
    "steps_per_call": {
        "type": parse_steps,
        "metavar": "N",
        "help": "steps of recurrent layers per delegate call: a number, auto or all; default: auto",
    },
    "require_runnable": {
        "action": "store_true",
        "help": "fail, instead of warn, if a CPU operator has no ExecuTorch kernel",
    },
}
#: Help text for the default of sample arguments: the example inputs that ``torch.export.save`` stores.
MODEL_INPUTS = "the inputs in the model's file"
_SOURCE_HELP = "a .npz, .npy or image file, a folder of such files, or module:function"


def parse_recipe(text: str) -> str:
    """Parse the name of a recipe, in any case."""
    try:
        return normalize_recipe_name(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def add_model(parser: Parser) -> None:
    """Add the argument for the model's file."""
    parser.add_argument("model", type=Path, help="file written by torch.export.save")


def add_recipe(parser: Parser, *, required: bool = True, calibration_default: str = MODEL_INPUTS) -> None:
    """Add the arguments for a recipe and its options. ``calibration_default`` describes the default samples."""
    recipe_group = parser.group("recipe").add_mutually_exclusive_group(required=required)
    recipe_group.add_argument(
        "--recipe",
        type=parse_recipe,
        metavar="NAME",
        help="recipe to compile for; list them with 'arm-recipes recipes'",
    )
    recipe_group.add_argument(
        "--tuned", type=Path, metavar="FILE", help="use a recipe written by 'arm-recipes tune --save'"
    )
    for option in options.OPTIONS.values():
        if option.name == "calibration_samples":
            add_samples(parser, "--calibration-samples", "calibration samples", default=calibration_default)
            continue
        if option.name == "qat":  # a function, which the command line cannot express
            continue
        add_option(parser, option.name, default=argparse.SUPPRESS)


def option_flag(name: str) -> str:
    """Return the command-line flag of a recipe option."""
    return _FLAG_NAMES.get(name, _argument_flag(name))


def add_option(parser: Parser, name: str, **keywords: Any) -> None:
    """Add the argument for an option of a recipe. ``keywords`` are arguments of ``add_argument``."""
    group = parser.group(OPTION_GROUP_TITLES[options.OPTIONS[name].group])
    group.add_argument(option_flag(name), dest=name, **_ARGPARSE_KEYWORDS[name], **keywords)


def add_data_file(parser: Parser) -> None:
    """Add the argument for the data file of a program."""
    parser.add_argument(
        "--ptd", type=Path, metavar="FILE", help="data file of the program; default: model.ptd beside it"
    )


def add_samples(parser: Parser, flag: str, purpose: str, *, default: str = "none", required: bool = False) -> None:
    """Add the arguments for samples of a model's inputs, and for the normalization of images."""
    group = parser.group(SAMPLES)
    text = f"{purpose}: {_SOURCE_HELP}" + ("" if required else f"; default: {default}")
    group.add_argument(flag, metavar="SOURCE", required=required, default=None, help=text)
    if not any(action.dest == "mean" for action in parser._actions):
        group.add_argument(
            "--mean", type=_parse_numbers, metavar="R,G,B", help="subtract from images scaled to 0..1; default: 0"
        )
        group.add_argument(
            "--std", type=_parse_numbers, metavar="R,G,B", help="divide images by, after --mean; default: 1"
        )


def add_result_file(parser: Parser) -> None:
    """Add ``-o``, for commands that print their result. ``main`` writes the file."""
    parser.group(OUTPUT).add_argument(
        *("-o", "--output"),
        dest="result_file",
        type=Path,
        metavar="FILE",
        help="write the result to this file; default: standard output",
    )


def add_json(parser: Parser) -> None:
    """Add the flag for results as JSON. If the command has no ``-o`` yet, add ``-o`` for the printed result."""
    if "-o" not in parser._option_string_actions:
        add_result_file(parser)
    parser.group(OUTPUT).add_argument("--json", action="store_true", help="print the result as JSON")


def read_recipe_options(args: argparse.Namespace) -> dict[str, Any]:
    """Return the recipe's options except the calibration samples. With ``--tuned``, set ``args.recipe`` from the file.

    Checks the options, the model's file and the source of the calibration samples as far as possible without importing
    PyTorch.

    Raises:
        ValueError: an argument is invalid.
    """
    recipe_options = {name: getattr(args, name) for name in options.OPTIONS if hasattr(args, name)}
    if args.tuned is not None:
        args.recipe, saved_options = read_saved_recipe(args.tuned)
        recipe_options = saved_options | recipe_options
    source = recipe_options.pop("calibration_samples", None)
    if source is not None:
        check_source(source, "--calibration-samples")
        options.resolve_options(args.recipe, {"calibration_samples": [source]})
    SPEC_BUILDERS[args.recipe](options.resolve_options(args.recipe, recipe_options))
    check_saved_program(args.model)
    return recipe_options


def load_model(path: Path) -> ExportedProgram:
    """Load a program saved by ``torch.export.save``.

    Raises:
        ValueError: the file holds no program.
    """
    from arm_recipes.samples import export_arguments

    program: Any = export_arguments.models_by_method(path)["forward"]
    return program


def build_recipe(args: argparse.Namespace, recipe_options: dict[str, Any], samples: Any) -> ExportRecipe:
    """Build the recipe with its options, and with calibration samples unless they are None."""
    from arm_recipes import ArmRecipeType, ExportRecipe

    calibration = {} if samples is None else {"calibration_samples": samples}
    return ExportRecipe.get_recipe(ArmRecipeType[args.recipe], **recipe_options, **calibration)


def read_model_samples(args: argparse.Namespace, name: str, program: ExportedProgram) -> Any:
    """Read the samples of an argument in the form that ``export`` takes; None if the argument is absent.

    Raises:
        ValueError: the samples do not fit the program.
    """
    source = getattr(args, name)
    if source is None:
        return None
    import torch

    from arm_recipes.runtime.tensor_info import TensorInfo
    from arm_recipes.samples.call_inputs import InputSignature

    def static_shape(shape: torch.Size) -> tuple[int, ...]:
        # A comparison with a symbolic size would specialize the program.
        return tuple(size if isinstance(size, int) else DYNAMIC_SIZE for size in shape)

    input_signature = InputSignature.from_program(program)
    input_infos = [
        TensorInfo(name, dtype_name(leaf.dtype), static_shape(leaf.shape))
        for name, leaf in zip(input_signature.names, input_signature.leaves, strict=True)
        if isinstance(leaf, torch.Tensor)
    ]
    samples = read_argument_samples(args, name, input_infos)
    if is_function(source):
        return check_returned_samples(samples, input_signature, f"{_argument_flag(name)}: '{source}'")
    structured = []
    for tensors in samples:
        values = iter(tensors)
        structured.append(
            input_signature.unflatten(
                [next(values) if isinstance(x, torch.Tensor) else x for x in input_signature.leaves]
            )
        )
    return structured


def _argument_flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def read_argument_samples(args: argparse.Namespace, name: str, input_infos: Sequence[TensorInfo]) -> Any:
    """Read the samples that an argument names: a .npz, .npy or image file, a folder of such files, or a function.

    Returns:
        A list of tuples of tensors, one tensor per input; for a function, its result.

    Raises:
        ValueError: the samples do not fit the inputs.
    """
    normalization = ImageNormalization(args.mean or (0.0,), args.std or (1.0,))
    return read_samples(getattr(args, name), _argument_flag(name), input_infos, normalization)


def program_inputs(program: Program, method: str) -> Sequence[TensorInfo]:
    """Return the inputs of a method.

    Raises:
        ValueError: an input is not a tensor.
    """
    from arm_recipes.runtime.tensor_info import TensorInfo

    input_infos = []
    for value in program.signature(method).inputs:
        if not isinstance(value, TensorInfo):
            raise ValueError(
                f"'{method}' takes '{value.name}' ({value}), which is not a tensor; run this program from Python"
            )
        input_infos.append(value)
    return input_infos


def print_written_path(path: Path) -> None:
    """Print the path of a written file on stderr, apart from the result."""
    print(f"wrote {path}", file=sys.stderr)


def print_result(result: Any, *, as_json: bool) -> None:
    """Print a result as text or JSON."""
    if as_json:
        print_json(result.to_dict())
    else:
        print(result)


def print_json(value: Any) -> None:
    """Print the result of ``--json`` as one document of strict JSON. Infinity and NaN become strings."""
    from arm_recipes._internal.rendering import to_jsonable

    print(json.dumps(to_jsonable(value), indent=2, allow_nan=False))


def _parse_numbers(text: str) -> tuple[float, ...]:
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number or a comma-separated list of numbers") from None
