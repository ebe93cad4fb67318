"""Arguments that several commands have, and how they are read."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from arm_recipes._internal.files import check_saved_program
from arm_recipes.cli.samples import Images, check_source, read_samples
from arm_recipes.recipe import options
from arm_recipes.recipe.saved import read_recipe
from arm_recipes.recipe.targets import SPECS, recipe_name

if TYPE_CHECKING:
    from executorch.export import ExportRecipe
    from torch.export import ExportedProgram

    from arm_recipes.runtime.program import Program
    from arm_recipes.runtime.tensor_info import TensorInfo

    Commands = argparse._SubParsersAction[argparse.ArgumentParser]


class _Pairs(argparse.Action):
    """Collects MODULE=NAME."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option_string: Any = None
    ) -> None:
        module, equals, name = values.rpartition("=")
        if not equals:
            raise argparse.ArgumentError(self, f"{values!r} is not of the form MODULE=NAME")
        setattr(namespace, self.dest, {**getattr(namespace, self.dest, {}), module: name})


def parse_steps(text: str) -> int | str:
    """Steps of a call, for argparse: a number, "auto", or "all", which is more than any layer has."""
    return text if text == "auto" else sys.maxsize if text == "all" else int(text)


#: Options of recipes whose flags are not what their default says: a switch for a bool, text for the others.
FLAG_OVERRIDES: dict[str, tuple[str, dict[str, Any]]] = {
    "macs": ("--macs", {"type": int}),
    "extra_flags": ("--extra-flags", {"action": "append", "metavar": "FLAG", "help": "for Vela; repeat for more"}),
    "extensions": ("--extension", {"action": "append", "metavar": "NAME", "help": "of TOSA; repeat for more"}),
    "precisions": (
        "--precision",
        {"action": _Pairs, "metavar": "MODULE=NAME", "help": "A16W8 for one; repeat for more"},
    ),
    "per_channel": ("--per-tensor", {"action": "store_false", "help": "one scale per weight tensor"}),
    "search_alternatives": (
        "--no-search-alternatives",
        {"action": "store_false", "help": "take the usual forms, and ask Vela for no prices"},
    ),
    "algorithms": (
        "--algorithms",
        {"nargs": "*", "metavar": "NAME", "help": "of the improvements, these alone, or none"},
    ),
    "min_sqnr": ("--min-sqnr", {"type": float, "metavar": "DB", "help": "that rounding must leave of each output"}),
    "steps_per_call": (
        "--steps-per-call",
        {"type": parse_steps, "metavar": "N", "help": "of a recurrent layer; auto by default, or all"},
    ),
    "require_runnable": ("--require-runnable", {"action": "store_true"}),
}
_SOURCE = "a .npz or .npy file, a folder of them or of images, or module:function"


def parse_recipe(text: str) -> str:
    """The name of a recipe, in any case, for argparse."""
    try:
        return recipe_name(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def add_model(parser: argparse.ArgumentParser) -> None:
    """The model as a file."""
    parser.add_argument("model", type=Path, help="file written by torch.export.save")


def add_recipe(parser: argparse.ArgumentParser, *, required: bool = True) -> None:
    """A recipe with its options."""
    which = parser.add_mutually_exclusive_group(required=required)
    which.add_argument("--recipe", type=parse_recipe, metavar="NAME", help="see arm-recipes recipes")
    which.add_argument("--tuned", type=Path, metavar="FILE", help="a recipe as arm-recipes tune --save writes it")
    for option in options.OPTIONS.values():
        if option.name == "calibration_samples":
            add_samples(parser, "--calibration-samples", "to calibrate with, instead of the inputs in the model's file")
            continue
        if option.name == "qat":  # a function, which no command line can give
            continue
        switch = {"action": "store_true"} if isinstance(option.default, bool) else {}
        flag, kind = FLAG_OVERRIDES.get(option.name, ("--" + option.name.replace("_", "-"), switch))
        help_ = {"help": option.expects} if not kind else {}
        parser.add_argument(flag, dest=option.name, default=argparse.SUPPRESS, **{**kind, **help_})


def add_samples(parser: argparse.ArgumentParser, flag: str, what: str, *, required: bool = False) -> None:
    """Samples of a model's inputs, and what is done to images."""
    parser.add_argument(flag, metavar="SOURCE", required=required, default=None, help=f"{what}: {_SOURCE}")
    if not any(action.dest == "mean" for action in parser._actions):
        parser.add_argument("--mean", type=_numbers, metavar="R,G,B", help="taken off images, of 0 to 1; default: 0")
        parser.add_argument("--std", type=_numbers, metavar="R,G,B", help="that images are divided by; default: 1")


def add_json(parser: argparse.ArgumentParser) -> None:
    """Results as JSON."""
    parser.add_argument("--json", action="store_true", help="print it as JSON")


def read_recipe_options(given: argparse.Namespace) -> dict[str, Any]:
    """The options of the recipe, checked as far as that goes without importing PyTorch; calibration is not in it.

    Raises:
        ValueError: an argument is wrong.
    """
    found = {name: getattr(given, name) for name in options.OPTIONS if hasattr(given, name)}
    if given.tuned is not None:
        given.recipe, written = read_recipe(given.tuned)
        found = written | found
    source = found.pop("calibration_samples", None)
    if source is not None:
        check_source(source, "--calibration-samples")
        options.check(given.recipe, {"calibration_samples": [source]})
    SPECS[given.recipe](options.check(given.recipe, found))
    check_saved_program(given.model)
    return found


def load_model(path: Path) -> ExportedProgram:
    """The program of a file.

    Raises:
        ValueError: it has none.
    """
    from arm_recipes.samples import inputs

    program: Any = inputs.models_by_method(path)["forward"]
    return program


def build_recipe(given: argparse.Namespace, found: dict[str, Any], program: ExportedProgram) -> ExportRecipe:
    """The recipe with these options, and with its calibration samples read.

    Raises:
        ValueError: they do not fit the program.
    """
    from arm_recipes import ArmRecipeType, ExportRecipe

    samples = model_samples(given, "calibration_samples", program)
    calibration = {} if samples is None else {"calibration_samples": samples}
    return ExportRecipe.get_recipe(ArmRecipeType[given.recipe], **found, **calibration)


def model_samples(given: argparse.Namespace, name: str, program: ExportedProgram) -> Any:
    """What ``export`` takes as samples, of the source that an argument names; None where it names none.

    Raises:
        ValueError: what is there does not fit the program.
    """
    source = getattr(given, name)
    if source is None:
        return None
    import torch

    from arm_recipes.runtime.tensor_info import TensorInfo
    from arm_recipes.samples.sample import Pattern

    pattern = Pattern.of_program(program)
    slots = [
        TensorInfo(name, str(leaf.dtype).removeprefix("torch."), tuple(leaf.shape))
        for name, leaf in zip(pattern.names, pattern.leaves, strict=True)
        if isinstance(leaf, torch.Tensor)
    ]
    found = read_argument_samples(given, name, slots)
    if callable(found):
        return found
    made = []
    for tensors in found:
        values = iter(tensors)
        made.append(pattern.unflatten([next(values) if isinstance(x, torch.Tensor) else x for x in pattern.leaves]))
    return made


def read_argument_samples(given: argparse.Namespace, name: str, slots: Sequence[TensorInfo]) -> Any:
    """Samples as tuples of tensors, one for each of ``slots``; a function of the user's as it is.

    Raises:
        ValueError: what is there does not fit.
    """
    images = Images(given.mean or (0.0,), given.std or (1.0,))
    return read_samples(getattr(given, name), f"--{name.replace('_', '-')}", slots, images)


def program_inputs(program: Program, method: str) -> Sequence[TensorInfo]:
    """The inputs of a method.

    Raises:
        ValueError: one is no tensor.
    """
    from arm_recipes.runtime.tensor_info import TensorInfo

    slots = []
    for value in program.signature(method).inputs:
        if not isinstance(value, TensorInfo):
            raise ValueError(f"'{method}' takes '{value.name}' ({value}), which is no tensor: use it from Python")
        slots.append(value)
    return slots


def check_no_overwrite(read: Iterable[Path | str | None], written: Iterable[Path | str | None]) -> None:
    """Find out whether a command would write over a file that it reads, or over another one that it writes.

    Raises:
        ValueError: it would.
    """
    known = {Path(path).expanduser().resolve() for path in read if path is not None}
    for path in written:
        if path is None:
            continue
        target = Path(path).expanduser().resolve()
        if target in known:
            raise ValueError(f"cannot write '{path}': the command reads that file, or writes something else there")
        known.add(target)


def report_written(path: Path) -> None:
    """Say what was written, where it does not get in the way of the result."""
    print(f"wrote {path}", file=sys.stderr)


def print_result(result: Any, *, as_json: bool) -> None:
    """Print what has ``to_dict`` and ``__str__``."""
    if as_json:
        print_json(result.to_dict())
    else:
        print(result)


def print_json(value: Any) -> None:
    """Print the one document of a command's ``--json``; it is JSON for every reader: infinity and NaN are texts."""
    from arm_recipes._internal.rendering import to_jsonable

    print(json.dumps(to_jsonable(value), indent=2, allow_nan=False))


def _numbers(text: str) -> tuple[float, ...]:
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number, or numbers with commas between them") from None
