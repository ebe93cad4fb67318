"""Typed dicts of the recipe options, for code completion and type checkers.

These types have no effect at run time: the entries of ``options.OPTIONS`` validate the options.
``tests/recipe/test_options.py`` checks that each typed dict has the options of its recipes, and no others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypedDict

#: Precisions of quantizing recipes. "A8W4": int8 activations and 4-bit weights.
IntPrecision = Literal["INT8", "A8W4", "A16W8"]
#: Precisions of quantizing and other recipes. "FP": floating point.
Precision = Literal["FP", "INT8", "A8W4", "A16W8"]
#: A number of bytes, or a string such as ``512KiB``.
Bytes = int | str


class CommonOptions(TypedDict, total=False):
    """Options of all recipes."""

    steps_per_call: int | Literal["auto"] | None
    plan_inputs: bool
    plan_outputs: bool
    require_full_delegation: bool
    require_runnable: bool | Literal["warn"]
    dump_dir: str | Path | None


class QuantizationOptions(CommonOptions, total=False):
    """Options of recipes that quantize. The recipes ``VGF_FP`` and ``TOSA_FP`` do not have them."""

    per_channel: bool
    precisions: Mapping[str, str] | None
    calibration_samples: Iterable[Any] | Callable[[], Iterable[Any]] | None
    observer: Literal["mse", "minmax", "percentile", "entropy"]
    algorithms: bool | Sequence[str] | set[str] | frozenset[str]
    qat: Callable[[Any], Any] | None
    min_sqnr: float | None
    quantized_io: bool
    input_dtype: Literal["uint8"] | None


class EthosUOptions(QuantizationOptions, total=False):
    """Options of Ethos-U recipes."""

    board: str | None
    macs: int
    system_config: str | None
    memory_mode: str | None
    extra_flags: Sequence[str] | None
    config_ini: str | Path | None
    search_alternatives: bool
    optimise: Literal["auto", "performance", "size", "ram"]
    sram_budget: Bytes | None
    flash_budget: Bytes | None
    cpu: str | None
    memory: Mapping[str, Bytes | None] | None
    shared_scratch: bool
    #: Blocks that are stored as external data, in a data file (``.ptd``) beside the program.
    external: bool | Sequence[Literal["weights", "commands"]]


class EthosU85Options(EthosUOptions, total=False):
    """Options of Ethos-U85 recipes."""

    direct_drive: bool


class CortexMOptions(QuantizationOptions, total=False):
    """Options of Cortex-M recipes."""

    cpu: str
    isa: Literal["mve", "dsp", "scalar"] | None
    sram_budget: Bytes | None
    flash_budget: Bytes | None


class VgfOptions(QuantizationOptions, total=False):
    """Options of VGF recipes."""

    extensions: Sequence[str] | None


class TosaOptions(VgfOptions, total=False):
    """Options of TOSA recipes."""

    mx: Literal["fp8e4m3", "fp8e5m2", "fp6e2m3", "fp6e3m2", "fp4e2m1"] | None
