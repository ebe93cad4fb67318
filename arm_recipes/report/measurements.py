"""Device measurements: read the JSON lines of the firmware's self-test, and compare them with Vela's estimates."""

from __future__ import annotations

import json
import statistics
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from arm_recipes._internal.rendering import Renderable, Section, to_jsonable
from arm_recipes.report.npu_layer_costs import apportion

#: Start of the JSON object in a line of the log. The line may begin with other text, such as a time stamp.
_MARK: Final = '{"arm_recipes_run"'
#: Maximum number of layers in the printed table.
_MAX_LAYER_ROWS: Final = 20


@dataclass(frozen=True)
class Measurement:
    """One run on a device.

    Attributes:
        npu: NPU that the program was compiled for, for example ``Ethos-U55-128``.
        method: method that ran.
        case: number of the test case.
        cpu_cycles: cycles of the core, which include waiting for the NPU; None if the device does not count them.
        npu_cycles: cycles of the NPU; None if its driver does not count them.
        counters: {name: count} of further counters that the firmware reads, for example events of the NPU's PMU.
        layers: {tensor: cycles}, where the tensor is a layer's result in the TOSA graph. The self-test does not write
            this entry. The user may add it to the log, with cycles from a trace of the board.
        program_crc32: CRC-32 of the ``.pte`` on the device.
    """

    npu: str
    method: str
    case: int
    cpu_cycles: int | None = None
    npu_cycles: int | None = None
    counters: dict[str, int] = field(default_factory=dict)
    layers: dict[str, int] = field(default_factory=dict)
    program_crc32: str = ""


@dataclass(frozen=True)
class MethodComparison:
    """Medians of the measurements of one method over its runs, and Vela's estimate for the method.

    Attributes:
        method: name of the method.
        runs: number of runs.
        cpu_cycles, npu_cycles: measured cycles; None if they were not counted.
        estimated_npu_cycles: Vela's total cycles of the method's delegates; None if unknown.
        counters: {name: median} of ``Measurement.counters``.
        layers: (module, source line, estimated cycles, measured cycles) of each measured layer, sorted by measured
            cycles, the most first.
    """

    method: str
    runs: int
    cpu_cycles: float | None
    npu_cycles: float | None
    estimated_npu_cycles: int | None
    counters: dict[str, float]
    layers: tuple[tuple[str, str, int, float], ...] = ()

    @property
    def rows(self) -> list[tuple[str, ...]]:
        """Rows of the table."""
        rows: list[tuple[str, ...]] = [("runs", str(self.runs), "", "")]
        estimate = "" if self.estimated_npu_cycles is None else f"{self.estimated_npu_cycles:,} by Vela's estimate"
        measured = "not counted" if self.npu_cycles is None else f"{self.npu_cycles:,.0f} measured"
        rows.append(("NPU cycles", measured, estimate, _format_ratio(self.npu_cycles, self.estimated_npu_cycles)))
        cpu = "not counted" if self.cpu_cycles is None else f"{self.cpu_cycles:,.0f} measured"
        rows.append(("core cycles", cpu, "with the wait for the NPU", ""))
        return rows + [(name, f"{value:,.0f} measured", "", "") for name, value in self.counters.items()]


@dataclass(frozen=True)
class MeasuredReport(Renderable):
    """Measurements and estimates by method. ``print`` it, show it in a notebook, or convert it with ``to_dict()``."""

    methods: tuple[MethodComparison, ...]

    def sections(self) -> Iterator[Section]:
        """Headings with their table rows, for text and HTML."""
        for method in self.methods:
            suffix = f" of '{method.method}'" if len(self.methods) > 1 else ""
            yield f"Measured on the device{suffix}, medians", method.rows
            rows: list[tuple[str, ...]] = [
                (f"{measured:,.0f} measured", f"{estimate:,} estimated", _format_ratio(measured, estimate), name, line)
                for name, line, estimate, measured in method.layers[:_MAX_LAYER_ROWS]
            ]
            if rows:
                yield f"Measured layers{suffix}: {len(rows)} of {len(method.layers)}", rows

    def to_dict(self) -> dict[str, Any]:
        """The measurements and estimates, ready for JSON."""
        return {"methods": [to_jsonable(method) for method in self.methods]}


def read_measurements(path: str | Path) -> tuple[Measurement, ...]:
    """Read the JSON lines of the self-test from a log. Other lines are ignored.

    Raises:
        ValueError: the file cannot be read, has no measurements, or a line of measurements is damaged.
    """
    try:
        text = Path(path).expanduser().read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise ValueError(f"cannot read '{path}': {error.strerror}") from error
    lines = enumerate(text.splitlines(), 1)
    found = tuple(_parse_line(path, number, line) for number, line in lines if _MARK in line)
    if not found:
        raise ValueError(
            f"'{path}' has no measurements: save the output of the firmware's self-test, with lines that begin with "
            f"{_MARK}"
        )
    return found


def _parse_line(path: str | Path, number: int, line: str) -> Measurement:
    try:
        values, _ = json.JSONDecoder().raw_decode(line[line.index(_MARK) :])
        return Measurement(
            npu=str(values["npu"]),
            method=str(values["method"]),
            case=int(values["case"]),
            cpu_cycles=_to_count(values.get("cpu_cycles")),
            npu_cycles=_to_count(values.get("npu_cycles")),
            counters={str(name): int(count) for name, count in values.get("counters", {}).items()},
            layers={str(name): int(count) for name, count in values.get("layers", {}).items()},
            program_crc32=str(values.get("program_crc32", "")),
        )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"line {number} of '{path}' is damaged ({type(error).__name__}: {error}): save the log again"
        ) from None


def _to_count(value: Any) -> int | None:
    return None if value is None else int(value)


def compare_measurements(measurements: Sequence[Measurement], report: Mapping[str, Any]) -> MeasuredReport:
    """Compare measurements with the estimates of an export.

    Args:
        measurements: result of ``read_measurements``.
        report: ``Report.to_dict()`` of the export; if it is empty, the result has only measurements.

    Raises:
        ValueError: the measurements are of another program: the export lacks a measured method, or has another NPU.
    """
    methods = {method["name"]: method for method in report.get("methods", ())}
    comparisons = []
    for name in dict.fromkeys(each.method for each in measurements):
        runs = [each for each in measurements if each.method == name]
        if methods and name not in methods:
            raise ValueError(
                f"the log measures the method '{name}', the export has {', '.join(methods)}: "
                "give the log of this program"
            )
        vela = [each["vela"] for each in methods.get(name, {}).get("delegates", ()) if each.get("vela")]
        for estimates in vela:
            _check_npu(runs, estimates["accelerator"])
        comparisons.append(
            MethodComparison(
                name,
                len(runs),
                _median([each.cpu_cycles for each in runs]),
                _median([each.npu_cycles for each in runs]),
                sum(estimates["total_cycles"] for estimates in vela) if vela else None,
                _medians([each.counters for each in runs]),
                tuple(_compare_layers(_medians([each.layers for each in runs]), name, report)),
            )
        )
    return MeasuredReport(tuple(comparisons))


def _check_npu(runs: Sequence[Measurement], accelerator: str) -> None:
    for run in runs:
        if run.npu.lower() != accelerator.lower():
            raise ValueError(
                f"the log measures an {run.npu}, the export is for {accelerator}: give the log of this program"
            )


def _compare_layers(
    measured: Mapping[str, float], method: str, report: Mapping[str, Any]
) -> list[tuple[str, str, int, float]]:
    """Return (module, source line, estimated cycles, measured cycles) of each measured layer, most cycles first.

    An NPU operation may compute parts of several layers. Its measured cycles are divided among these layers in
    proportion to their estimated cycles.
    """
    layers = [layer for layer in report.get("layers", ()) if layer["method"] == method]
    estimates: defaultdict[str, dict[int, int]] = defaultdict(dict)  # {tensor: {position in layers: cycles}}
    for position, layer in enumerate(layers):
        for tensor in layer["tensors"]:
            estimates[tensor][position] = max(layer["cycles"], 1)
    cycles: defaultdict[int, float] = defaultdict(float)
    for tensor, shares in estimates.items():
        if tensor in measured:
            for position, part in apportion(measured[tensor], shares).items():
                cycles[position] += part
    rows = [
        (layer["module"], layer["source"], layer["cycles"], cycles[position])
        for position, layer in enumerate(layers)
        if position in cycles
    ]
    return sorted(rows, key=lambda row: -row[3])


def _median(values: Sequence[int | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def _medians(counts: Sequence[Mapping[str, int]]) -> dict[str, float]:
    names = dict.fromkeys(name for each in counts for name in each)
    return {name: statistics.median([each[name] for each in counts if name in each]) for name in names}


def _format_ratio(measured: float | None, estimate: int | None) -> str:
    return f"{measured / estimate - 1:+.0%}" if measured is not None and estimate else ""
