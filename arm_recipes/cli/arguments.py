"""Arguments shared by several commands: argparse definitions and parsing."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from arm_recipes._internal.files import check_saved_program
from arm_recipes.cli.samples import ImageNormalization, check_source, read_samples
from arm_recipes.recipe import options
from arm_recipes.recipe.saved import read_recipe
from arm_recipes.recipe.targets import SPEC_BUILDERS, normalize_recipe_name

if TYPE_CHECKING:
    from executorch.export import ExportRecipe
    from torch.export import ExportedProgram

    from arm_recipes.runtime.program import Program
    from arm_recipes.runtime.tensor_info import TensorInfo

    Commands = argparse._SubParsersAction[argparse.ArgumentParser]


class _CollectPairs(argparse.Action):
    """Collects MODULE=NAME pairs in a dict."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option_string: Any = None
    ) -> None:
        module, equals, name = values.rpartition("=")
        if not equals:
            raise argparse.ArgumentError(self, f"{values!r} is not of the form MODULE=NAME")
        setattr(namespace, self.dest, {**getattr(namespace, self.dest, {}), module: name})


def parse_steps(text: str) -> int | str:
    """Parse steps per call: a number, "auto", or "all", which maps to ``sys.maxsize``."""
    return text if text == "auto" else sys.maxsize if text == "all" else int(text)


#: Recipe option -> command-line flag, for flags with another name.
_FLAG_NAMES = {
    "extensions": "--extension",
    "per_channel": "--per-tensor",
    "precisions": "--precision",
    "search_alternatives": "--no-search-alternatives",
}
_BUDGET_HELP = "fail if the program needs more {}: bytes, or a text such as 512KiB"
#: Recipe option -> keyword arguments of ``add_argument``.
_ARGPARSE_KEYWORDS: dict[str, dict[str, Any]] = {
    "board": {"metavar": "NAME", "help": "compile for this board; list them with 'arm-recipes boards'"},
    "macs": {"type": int, "metavar": "N", "help": "MACs per cycle of the NPU; default: the recipe's"},
    "system_config": {"metavar": "NAME", "help": "[System_Config] of the Vela .ini; default: the recipe's"},
    "memory_mode": {"metavar": "NAME", "help": "[Memory_Mode] of the Vela .ini; default: the recipe's"},
    "config_ini": {"metavar": "FILE", "help": "use this Vela .ini file"},
    "optimise": {"metavar": "GOAL", "help": f"optimize for {', '.join(options.GOALS)}; default: auto"},
    "sram_budget": {"metavar": "BYTES", "help": _BUDGET_HELP.format("SRAM")},
    "flash_budget": {"metavar": "BYTES", "help": _BUDGET_HELP.format("flash")},
    "direct_drive": {
        "action": "store_true",
        "help": "compile for Linux on a Cortex-A that submits commands to the NPU itself",
    },
    "mx": {"metavar": "FORMAT", "help": f"use this MX format: {', '.join(options.MX_FORMATS)}"},
    "observer": {"metavar": "NAME", "help": f"range observer: {', '.join(options.OBSERVER_NAMES)}; default: mse"},
    "quantized_io": {
        "action": "store_true",
        "help": "take and return quantized integers, without quantize and dequantize at the boundary",
    },
    "require_full_delegation": {"action": "store_true", "help": "fail if an operator stays on the CPU"},
    "dump_dir": {"metavar": "FOLDER", "help": "write intermediate artifacts to this folder"},
    "extra_flags": {"action": "append", "metavar": "FLAG", "help": "pass a flag to Vela; repeat for several"},
    "extensions": {"action": "append", "metavar": "NAME", "help": "enable a TOSA extension; repeat for several"},
    "precisions": {
        "action": _CollectPairs,
        "metavar": "MODULE=NAME",
        "help": "set the precision of a module, such as head=A16W8; repeat for several",
    },
    "per_channel": {
        "action": "store_false",
        "help": "use one scale per weight tensor instead of one per channel",
    },
    "search_alternatives": {
        "action": "store_false",
        "help": "use the default alternatives, without cost estimates by Vela",
    },
    "algorithms": {
        "nargs": "*",
        "metavar": "NAME",
        "help": "enable only these quantization algorithms; without names, none",
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
_SOURCE_HELP = "a .npz or .npy file, a folder of them or of images, or module:function"


def parse_recipe(text: str) -> str:
    """Parse the name of a recipe, in any case."""
    try:
        return normalize_recipe_name(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def add_model(parser: argparse.ArgumentParser) -> None:
    """Add the argument for the model's file."""
    parser.add_argument("model", type=Path, help="file written by torch.export.save")


def add_recipe(parser: argparse.ArgumentParser, *, required: bool = True) -> None:
    """Add the arguments for a recipe and its options."""
    recipe_group = parser.add_mutually_exclusive_group(required=required)
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
            add_samples(parser, "--calibration-samples", "calibration samples; default: the inputs in the model's file")
            continue
        if option.name == "qat":  # a function, which the command line cannot express
            continue
        add_option(parser, option.name, default=argparse.SUPPRESS)


def add_option(parser: argparse.ArgumentParser, name: str, **keywords: Any) -> None:
    """Add the argument for an option of a recipe. ``keywords`` are arguments of ``add_argument``."""
    flag = _FLAG_NAMES.get(name, "--" + name.replace("_", "-"))
    parser.add_argument(flag, dest=name, **_ARGPARSE_KEYWORDS[name], **keywords)


def add_samples(parser: argparse.ArgumentParser, flag: str, purpose: str, *, required: bool = False) -> None:
    """Add the arguments for samples of a model's inputs, and for the normalization of images."""
    parser.add_argument(flag, metavar="SOURCE", required=required, default=None, help=f"{purpose}: {_SOURCE_HELP}")
    if not any(action.dest == "mean" for action in parser._actions):
        parser.add_argument(
            "--mean", type=_parse_numbers, metavar="R,G,B", help="subtract from images scaled to 0..1; default: 0"
        )
        parser.add_argument(
            "--std", type=_parse_numbers, metavar="R,G,B", help="divide images by, after --mean; default: 1"
        )


def add_json(parser: argparse.ArgumentParser) -> None:
    """Add the flag for results as JSON."""
    parser.add_argument("--json", action="store_true", help="print the result as JSON")


def read_recipe_options(args: argparse.Namespace) -> dict[str, Any]:
    """Return the recipe's options without calibration samples, checked as far as possible without PyTorch.

    Raises:
        ValueError: an argument is invalid.
    """
    recipe_options = {name: getattr(args, name) for name in options.OPTIONS if hasattr(args, name)}
    if args.tuned is not None:
        args.recipe, saved_options = read_recipe(args.tuned)
        recipe_options = saved_options | recipe_options
    source = recipe_options.pop("calibration_samples", None)
    if source is not None:
        check_source(source, "--calibration-samples")
        options.check(args.recipe, {"calibration_samples": [source]})
    SPEC_BUILDERS[args.recipe](options.check(args.recipe, recipe_options))
    check_saved_program(args.model)
    return recipe_options


def load_model(path: Path) -> ExportedProgram:
    """Load a program saved by ``torch.export.save``.

    Raises:
        ValueError: the file holds no program.
    """
    from arm_recipes.samples import inputs

    program: Any = inputs.models_by_method(path)["forward"]
    return program


def build_recipe(args: argparse.Namespace, recipe_options: dict[str, Any], program: ExportedProgram) -> ExportRecipe:
    """Build the recipe with its options and calibration samples.

    Raises:
        ValueError: the samples do not fit the program.
    """
    from arm_recipes import ArmRecipeType, ExportRecipe

    samples = read_model_samples(args, "calibration_samples", program)
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
    from arm_recipes.samples.sample import InputSignature

    input_signature = InputSignature.from_program(program)
    input_infos = [
        TensorInfo(name, str(leaf.dtype).removeprefix("torch."), tuple(leaf.shape))
        for name, leaf in zip(input_signature.names, input_signature.leaves, strict=True)
        if isinstance(leaf, torch.Tensor)
    ]
    samples = read_argument_samples(args, name, input_infos)
    if callable(samples):
        return samples
    structured = []
    for tensors in samples:
        values = iter(tensors)
        structured.append(
            input_signature.unflatten(
                [next(values) if isinstance(x, torch.Tensor) else x for x in input_signature.leaves]
            )
        )
    return structured


def read_argument_samples(args: argparse.Namespace, name: str, input_infos: Sequence[TensorInfo]) -> Any:
    """Read the samples of an argument as tuples of tensors, one per input. A user's function is returned unchanged.

    Raises:
        ValueError: the samples do not fit the inputs.
    """
    normalization = ImageNormalization(args.mean or (0.0,), args.std or (1.0,))
    return read_samples(getattr(args, name), f"--{name.replace('_', '-')}", input_infos, normalization)


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


def check_no_overwrite(read: Iterable[Path | str | None], written: Iterable[Path | str | None]) -> None:
    """Check that a command overwrites neither a file that it reads nor another file that it writes.

    Raises:
        ValueError: it would overwrite a file.
    """
    paths = {Path(path).expanduser().resolve() for path in read if path is not None}
    for path in written:
        if path is None:
            continue
        target = Path(path).expanduser().resolve()
        if target in paths:
            raise ValueError(f"cannot write '{path}': the command reads this file or writes another result to it")
        paths.add(target)


def report_written(path: Path) -> None:
    """Report a written file on stderr, apart from the result."""
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
