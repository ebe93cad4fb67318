"""Export record: methods, delegates, CPU operators and quantization of a program."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from arm_backend_core.format_count import format_count
from arm_recipes._internal.rendering import Renderable, Section, format_bytes, to_jsonable
from arm_recipes.report.costs import constants_row, layer_sections, memory_sections
from arm_recipes.report.kernels import KernelCall, kernel_sections
from arm_recipes.report.memory import iter_memory_usage
from arm_recipes.report.npu_layer_costs import DelegateProfile, iter_npu_layer_costs
from arm_recipes.runtime.payload_parts import WEIGHTS_PREFIX
from arm_recipes.runtime.tensor_info import TensorInfo
from arm_recipes.stages.edge.cpu_operators import CpuOperator

if TYPE_CHECKING:
    from arm_backend_core.backends.vela_estimates import VelaEstimates
    from arm_backend_core.compilation_log import DelegateRecord
    from arm_recipes.report.comparisons import TaskAccuracy
    from arm_recipes.report.memory import MemoryOverTime
    from arm_recipes.report.npu_layer_costs import LayerCost
    from arm_recipes.report.ram import Ram
    from arm_recipes.runtime.ethosu import EthosULayerStatistics, EthosUStatistics

#: {memory region of an Ethos-U: content of the region}. The NPU has one base address for each region.
_REGION_NAMES = {0: "weights", 1: "scratch", 2: "fast scratch", 3: "inputs", 4: "outputs"}
#: {operator that only converts types or memory formats at delegate boundaries: how to avoid the operator}.
CONVERSION_REMEDIES = {
    "quantize_per_tensor": "quantized_io=True: the program takes integers",
    "dequantize_per_tensor": "quantized_io=True: the program returns integers",
    "_to_copy": "int32 in place of int64, float32 in place of float64",
    "_to_dim_order_copy": "int32 in place of int64, float32 in place of float64; samples in the model's memory format",
    "_clone_dim_order": "samples in the memory format of the model (torch.channels_last)",
}
#: Name of the model that ``ExportRecord.accuracy`` compares the program with.
FLOAT_MODEL = "the floating-point model"
#: Maximum number of layers in each table of emulator statistics in the printed report.
_MAX_LAYER_ROWS = 5


@dataclass(frozen=True)
class Quantization:
    """The quantization of a method.

    Attributes:
        activations: number of quantized activations by dtype, for example ``{"int8": 12}``.
        weights: number of quantized constants by dtype and granularity, for example ``{"int8 per channel": 4}``.
        samples: number of calibration samples; None if the model was already quantized.
        sqnr: signal-to-quantization-noise ratio (SQNR) in dB of each floating-point output, by name. It is measured on
            the last calibration sample.
    """

    activations: dict[str, int]
    weights: dict[str, int]
    samples: int | None
    sqnr: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class MethodReport:
    """One method of the program.

    Attributes:
        name: the method's name.
        inputs: tensors that the program takes.
        outputs: tensors that the program returns.
        delegates: delegates of this package, in program order.
        other_delegates: number of delegates of each other backend (combined recipes), by backend id.
        boundary: {operator: count}, for operators outside the delegates that only convert types or memory formats.
        cpu_operators: operators outside the delegates that are not in ``boundary``, ``kernels`` or ``data_movement``.
        quantization: the quantization; None for a floating-point method.
        not_runnable: CPU operators that ExecuTorch's kernel library cannot execute, with the reason.
        kernels: calls of int8 kernels on a Cortex-M, without quantize and dequantize.
        data_movement: {operator: count}, for operators that only move int8 values between int8 kernels.
        cpu_layers: estimated costs of the layers outside delegates; empty if the CPU is not known, or if the
            CPU computes nothing.
    """

    name: str
    inputs: tuple[TensorInfo, ...]
    outputs: tuple[TensorInfo, ...]
    delegates: tuple[DelegateRecord, ...]
    other_delegates: dict[str, int]
    boundary: dict[str, int]
    cpu_operators: tuple[CpuOperator, ...]
    quantization: Quantization | None
    not_runnable: tuple[CpuOperator, ...] = ()
    kernels: tuple[KernelCall, ...] = ()
    data_movement: dict[str, int] = field(default_factory=dict)
    cpu_layers: tuple[LayerCost, ...] = ()

    @property
    def cpu_cycles(self) -> int | None:
        """Estimated cycles of the CPU for one inference; None if ``cpu_layers`` is empty."""
        return sum(cost.cycles for cost in self.cpu_layers) if self.cpu_layers else None

    @cached_property
    def profiles(self) -> tuple[DelegateProfile, ...]:
        """Cost profile of each delegate. Layer costs, memory usage and the HTML page share these profiles."""
        return tuple(DelegateProfile(self.name, delegate) for delegate in self.delegates)


@dataclass(frozen=True)
class ExportRecord(Renderable):
    """The record of one export.

    Attributes:
        recipe: name of the recipe.
        methods: the methods of the program.
        program_bytes: size of the ``.pte``.
        data_file_bytes: size of the data files (``.ptd``); 0 if there are none.
        seconds: wall-clock time of each stage in seconds, by ExecuTorch's name of the stage.
        notes: further notes for the user, one sentence each.
        measured: with ``verify=True``, the emulator's statistics of the last execution of each Ethos-U delegate. They
            are not measurements of a device. The keys are the names of the delegates. If the program has several
            methods, a key also contains the name of the method.
        cached: whether the program was taken from ``cache_dir``.
        ram: RAM that a board needs for the program; None if the program has no delegates for an Ethos-U and the CPU of
            the recipe is not a Cortex-M.
        accuracy: accuracy of the task, measured on the quantized model in PyTorch; None if ``export`` got neither
            labels nor a metric.
    """

    recipe: str
    methods: tuple[MethodReport, ...]
    program_bytes: int
    seconds: dict[str, float]
    notes: tuple[str, ...]
    measured: Mapping[str, EthosUStatistics] = field(default_factory=dict)
    cached: bool = False
    ram: Ram | None = None
    accuracy: TaskAccuracy | None = None
    data_file_bytes: int = 0

    @property
    def stored_bytes(self) -> int:
        """Size of the program and its data files, which ``flash_budget`` limits."""
        return self.program_bytes + self.data_file_bytes

    @property
    def total_seconds(self) -> float:
        """Wall-clock time of all stages."""
        return sum(self.seconds.values())

    @property
    def delegates(self) -> tuple[DelegateRecord, ...]:
        """Delegates of all methods."""
        return tuple(delegate for method in self.methods for delegate in method.delegates)

    @cached_property
    def layers(self) -> tuple[LayerCost, ...]:
        """Costs of the layers of all methods: on the Ethos-U, or on the CPU for a method without Ethos-U delegates."""
        return tuple(
            cost
            for method in self.methods
            for cost in (tuple(iter_npu_layer_costs(method.profiles)) or method.cpu_layers)
        )

    @cached_property
    def memory(self) -> tuple[MemoryOverTime, ...]:
        """Usage of the working memories of each Ethos-U delegate over time."""
        return tuple(used for method in self.methods for used in iter_memory_usage(method.profiles))

    @property
    def cpu_operators(self) -> tuple[CpuOperator, ...]:
        """``MethodReport.cpu_operators`` of all methods."""
        return tuple(operator for method in self.methods for operator in method.cpu_operators)

    def to_dict(self) -> dict[str, Any]:
        """The record as dicts, lists, strings and numbers, ready for JSON. Flatbuffers are replaced by their sizes."""
        return {
            "recipe": self.recipe,
            "program_bytes": self.program_bytes,
            "data_file_bytes": self.data_file_bytes,
            "seconds": {**self.seconds, "total": self.total_seconds},
            "notes": list(self.notes),
            "methods": [_method_dict(method) for method in self.methods],
            "layers": [to_jsonable(cost) for cost in self.layers],
            "memory": [to_jsonable(used) for used in self.memory],
            "measured": to_jsonable(dict(self.measured)),
            "cached": self.cached,
            "ram": self.ram and self.ram.to_dict(),
            "accuracy": self.accuracy and to_jsonable(self.accuracy),
        }

    def sections(self) -> Iterator[Section]:
        """Sections of the report, for text and HTML."""
        rows: list[tuple[str, ...]] = [("program", f"{format_bytes(self.program_bytes)}, the .pte file")]
        took = f"{self.total_seconds:.2f} s{', from the cache' if self.cached else ''}"
        yield f"Recipe {self.recipe}", [*rows, ("export", took)]
        if self.accuracy is not None:
            yield "Expected accuracy, run in PyTorch", self.accuracy.rows(FLOAT_MODEL)
        yield from self.ram.sections() if self.ram is not None else ()
        for method in self.methods:
            yield from _method_sections(method, many=len(self.methods) > 1)
            yield from self._cost_sections(method)
        for name, statistics in self.measured.items():
            yield f"Emulator counts of {name}", _emulator_statistics_rows(statistics)
            yield from _emulator_layer_sections(name, statistics)
        yield "Seconds per stage", [(stage, f"{seconds:.2f}") for stage, seconds in self.seconds.items()]
        if self.notes:
            yield "Notes", [(note,) for note in self.notes]

    def _cost_sections(self, method: MethodReport) -> Iterator[Section]:
        suffix = f" of '{method.name}'" if len(self.methods) > 1 else ""
        of_method = [cost for cost in self.layers if cost.method == method.name]
        yield from layer_sections([cost for cost in of_method if cost.delegate], suffix)
        # Omit the CPU's costs if an NPU computes the layers and the CPU only casts inputs and outputs.
        if not any(cost.delegate for cost in of_method) or any(cost.kind == "layer" for cost in method.cpu_layers):
            yield from layer_sections(method.cpu_layers, f"{suffix} on the CPU (estimate)")
        yield from memory_sections([used for used in self.memory if used.method == method.name], suffix)


def _method_sections(method: MethodReport, *, many: bool) -> Iterator[Section]:
    suffix = f" of '{method.name}'" if many else ""
    tensors = [("in", tensor) for tensor in method.inputs] + [("out", tensor) for tensor in method.outputs]
    yield f"Inputs and outputs{suffix}", [(side, tensor.name, str(tensor)) for side, tensor in tensors]
    if method.quantization is not None:
        yield f"Quantization{suffix}", _quantization_rows(method.quantization)
    count = sum(map(_count_model_operators, method.delegates))
    rows: list[tuple[str, ...]] = []
    for d in method.delegates:
        contents = f"{_count_model_operators(d)} operators, lowered to {len(d.tosa_operators)} TOSA operators"
        contents += f", called {d.calls} times" if d.calls > 1 else ""
        rows.append((d.name, d.backend, contents, format_bytes(d.payload_bytes)))
    rows += [(f"{number} more", backend, "", "") for backend, number in method.other_delegates.items()]
    if rows or not method.kernels:
        yield f"Delegates{suffix}: {len(method.delegates)}, {count} operators", rows or [("none",)]
    yield from kernel_sections(method.kernels, method.data_movement, suffix)
    for delegate in method.delegates:
        if delegate.vela is not None:
            in_data_file = any(key.startswith(WEIGHTS_PREFIX) for key in delegate.external_blocks)
            yield f"Vela's estimates for {delegate.name}", _vela_rows(delegate.vela, in_data_file)
    if method.boundary:
        yield (
            f"Boundary conversions{suffix}",
            [(name, str(number), _conversion_remedy(name)) for name, number in method.boundary.items()],
        )
    yield (
        f"Operators on the CPU{suffix}: {sum(operator.count for operator in method.cpu_operators)}",
        _operator_rows(method.cpu_operators) or [("none",)],
    )
    if method.not_runnable:
        yield f"Operators without a CPU kernel{suffix}", _operator_rows(method.not_runnable)


def _conversion_remedy(name: str) -> str:
    """How to change the model or the recipe to avoid a conversion."""
    return next((remedy for operator, remedy in CONVERSION_REMEDIES.items() if operator in name.split(".")), "")


def _operator_rows(operators: Sequence[CpuOperator]) -> list[tuple[str, ...]]:
    return [(f"{o.count} x {o.operator}", o.reason, "; ".join(o.sources)) for o in operators]


def _count_model_operators(delegate: DelegateRecord) -> int:
    """Number of the model's operators in a delegate, without quantize and dequantize."""
    return sum(not name.startswith("quantized_decomposed") for name in delegate.operators)


def _quantization_rows(quantization: Quantization) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    rows += [("activations", f"{number} x {kind}") for kind, number in quantization.activations.items()]
    for kind, number in quantization.weights.items():
        rows.append(("biases" if kind.startswith("int32") else "weights", f"{number} x {kind}"))
    if quantization.samples is not None:
        rows.append(("calibration", format_count(quantization.samples, "sample")))
    rows += [(name, f"SQNR {sqnr:.1f} dB") for name, sqnr in quantization.sqnr.items()]
    return rows or [("nothing is quantized",)]


def _vela_rows(vela: VelaEstimates, in_data_file: bool) -> list[tuple[str, ...]]:
    limit = "" if vela.sram_limit is None else f" of {format_bytes(vela.sram_limit)}"
    exceeded = " (exceeds the limit of the memory mode)" if vela.sram_exceeded else ""
    return [
        ("target", f"{vela.accelerator}, {vela.system_config}, {vela.memory_mode}"),
        ("NPU cycles", f"{vela.npu_cycles:,}"),
        ("total cycles", f"{vela.total_cycles:,}"),
        ("inference", f"{vela.inference_seconds * 1e3:.3f} ms at {vela.core_clock / 1e6:.0f} MHz"),
        ("SRAM", format_bytes(vela.sram_bytes) + limit + exceeded),
        ("DRAM", format_bytes(vela.dram_bytes)),
        constants_row(vela, in_data_file=in_data_file),
        *(
            [("fast scratch", f"{format_bytes(vela.fast_scratch_bytes)}, part of the SRAM")]
            if vela.fast_scratch_bytes
            else []
        ),
        ("MACs", f"{vela.macs:,}"),
        ("weights", f"{format_bytes(vela.weight_bytes)} encoded, {format_bytes(vela.original_weight_bytes)} original"),
    ]


def _emulator_statistics_rows(statistics: EthosUStatistics) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = [
        ("operations", f"{statistics.operations:,} by {statistics.commands:,} commands"),
        ("MACs", f"{statistics.macs:,}"),
    ]
    for region, peak in enumerate(statistics.peak):
        if peak:
            moved = _format_traffic(statistics.bytes_read[region], statistics.bytes_written[region])
            rows.append((_REGION_NAMES.get(region, f"region {region}"), f"{format_bytes(peak)} in use, {moved}"))
    return rows


def _emulator_layer_sections(name: str, statistics: EthosUStatistics) -> Iterator[Section]:
    """Yield the layers with the most memory traffic and those with the most MACs, with Vela's estimates."""
    by_bytes = sorted(statistics.layers, key=lambda layer: -layer.bytes_moved)[:_MAX_LAYER_ROWS]
    rows = []
    for layer in by_bytes:
        moved = _format_traffic(sum(layer.bytes_read), sum(layer.bytes_written))
        estimate = layer.origin.estimate
        cycles = estimate.memory_cycles if estimate else ()
        expected = ", ".join(f"{count:,} cycles of {memory}" for memory, count in cycles if count)
        rows.append(_layer_row(layer, moved, expected))
    if rows:
        yield f"Layers of {name} with the most memory traffic, and Vela's estimates", rows
    computing = [layer for layer in statistics.layers if layer.macs]
    by_macs = sorted(computing, key=lambda layer: -layer.macs)[:_MAX_LAYER_ROWS]
    rows = []
    for layer in by_macs:
        estimate = layer.origin.estimate
        expected = f"{estimate.macs:,} MACs, {estimate.npu_cycles:,} cycles" if estimate else ""
        rows.append(_layer_row(layer, f"{layer.macs:,} MACs", expected))
    if rows:
        yield f"Layers of {name} with the most MACs, and Vela's estimates", rows


def _format_traffic(read: int, written: int) -> str:
    return f"{format_bytes(read)} read, {format_bytes(written)} written"


def _layer_row(layer: EthosULayerStatistics, measured: str, estimate: str) -> tuple[str, ...]:
    origin = layer.origin
    return origin.module or origin.layer, origin.operator, measured, estimate, origin.source


def _method_dict(method: MethodReport) -> dict[str, Any]:
    return {
        "name": method.name,
        "inputs": [to_jsonable(tensor) for tensor in method.inputs],
        "outputs": [to_jsonable(tensor) for tensor in method.outputs],
        "delegates": [
            {**{k: v for k, v in to_jsonable(delegate).items() if k != "tosa"}, "tosa_bytes": len(delegate.tosa)}
            for delegate in method.delegates
        ],
        "other_delegates": method.other_delegates,
        "boundary": method.boundary,
        "cpu_operators": [to_jsonable(operator) for operator in method.cpu_operators],
        "not_runnable": [to_jsonable(operator) for operator in method.not_runnable],
        "kernels": [to_jsonable(call) for call in method.kernels],
        "data_movement": method.data_movement,
        "cpu_cycles": method.cpu_cycles,
        "quantization": to_jsonable(method.quantization),
    }
