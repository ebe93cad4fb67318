"""Comparison of ExecuTorch's own Arm backend ("the peer") with this project on the same models, inputs and machine.

Each measurement runs in a new process and prints one line of JSON. The table has the medians over the repeats, and the
ratios of our figures to the peer's. See README.md in this folder.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import importlib
import io
import json
import math
import os
import statistics
import subprocess
import sys
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.rows import Row, add_row, parse_printed_row, read_rows

RECIPES = ("TOSA_FP", "TOSA_INT8", "TOSA_A16W8", "ETHOSU_U55_INT8", "ETHOSU_U85_INT8", "VGF_FP", "VGF_INT8")
DEFAULT_RECIPES = RECIPES[:5]
BACKENDS = ("peer", "ours")
CALIBRATION = 4  # samples that both calibrate with
TEST_SAMPLES = 4  # further samples, on which the results are compared with floating point
#: Key of the seconds that the measurement itself takes.
INSTRUMENTATION = "instrumentation"
LOWERING = ("TORCH_EXPORT", "TO_EDGE_TRANSFORM_AND_LOWER")
BOUNDARY = (
    "quantize",
    "getitem",
    "_to_dim_order_copy",
    "_clone_dim_order",
)  # not counted as operators on the CPU

Inputs = tuple[Any, ...]


# --- one measurement, in a process of its own


def measure(model: str, recipe: str, backend: str) -> Row:
    """Export one model once and return the figures. Raises what the export raises."""
    import torch

    importlib.import_module("executorch.export")
    torch.set_num_threads(1)
    started = time.perf_counter()
    importlib.import_module("executorch.backends.arm.recipes" if backend == "peer" else "arm_recipes")
    row: Row = {"import_s": time.perf_counter() - started}

    from tests.models import zoo

    entry = zoo.build(model, CALIBRATION + TEST_SAMPLES)
    calibration, test_samples = entry.samples[:CALIBRATION], entry.samples[CALIBRATION:]
    with torch.no_grad():
        expected = [first_output(entry.model(*sample)) for sample in test_samples]

    export = _export_with_peer if backend == "peer" else _export_with_ours
    figures, run = export(entry.model, calibration, recipe)
    row.update(figures)
    if not recipe.startswith("VGF"):
        row.update(compute_accuracy(expected, [first_output(run(*sample)) for sample in test_samples]))
    return row


def _export_with_ours(model: Any, calibration: list[Inputs], name: str) -> tuple[Row, Callable[..., Any]]:
    """Returns the figures of an export with this project, and a function that executes the result."""
    from executorch.export import ExportRecipe

    from arm_recipes import ArmRecipeType, export

    started = time.perf_counter()
    result = export(model, ExportRecipe.get_recipe(ArmRecipeType[name]), calibration)
    figures: Row = {"total_s": time.perf_counter() - started}
    report = result.report
    vela = [delegate.vela for delegate in report.delegates if delegate.vela is not None]
    outside = {operator.operator: operator.count for operator in report.cpu_operators}
    figures |= {
        "stages_s": {stage.upper(): seconds for stage, seconds in report.seconds.items()},
        "pte_bytes": len(result.buffer),
        "delegates": len(report.delegates),
        "cpu_operators": outside,
        "cpu_count": sum(outside.values()),
        "cycles": sum(figure.total_cycles for figure in vela) or None,
        "npu_cycles": sum(figure.npu_cycles for figure in vela) or None,
    }
    return figures, partial(result.run, backend="tosa" if name.startswith("ETHOSU") else None)


def _export_with_peer(model: Any, calibration: list[Inputs], name: str) -> tuple[Row, Callable[..., Any]]:
    """Returns the figures of an export with ExecuTorch's backend, and a function that executes the result."""
    from executorch.backends.arm.recipes import ArmRecipeType
    from executorch.export import ExportRecipe, ExportSession, export

    stages: dict[str, float] = {}
    programs: list[Any] = []
    _instrument_stages(ExportSession, stages, programs)
    started = time.perf_counter()
    with _record_vela_calls() as (reports, flatbuffers):
        recipe = ExportRecipe.get_recipe(ArmRecipeType[name.replace("ETHOSU_", "ETHOS_")])
        session = export(model, calibration, recipe)
    figures: Row = {"total_s": time.perf_counter() - started - stages.pop(INSTRUMENTATION)}
    (program,) = programs
    figures |= {
        "stages_s": stages,
        "pte_bytes": len(session.get_pte_buffer()),
        "cycles": sum(int(report.totalCycles) for report in reports) or None,
        "npu_cycles": sum(int(report.npuCycles) for report in reports) or None,
        **_partition(program),
    }
    return figures, lambda *inputs: run_lowered(program, inputs, flatbuffers)


def first_output(output: Any) -> Any:
    """The first of several outputs, or the only one."""
    return output[0] if isinstance(output, tuple | list) else output


def _instrument_stages(session_class: Any, seconds: dict[str, float], programs: list[Any]) -> None:
    """Patch ExecuTorch so that each export session adds the seconds of its stages to ``seconds``.

    A copy of the lowered edge program is appended to ``programs``, because the emitter rewrites it in place. The copy
    takes ``seconds[INSTRUMENTATION]``.
    """
    original = session_class._build_stages

    def build(self: Any, pipeline: Any) -> Any:
        registry = original(self, pipeline)
        for kind, stage in registry.items():
            stage.run = _timed(stage.run, str(getattr(kind, "name", kind)), seconds, programs)
        return registry

    session_class._build_stages = build


def _timed(
    run: Callable[[Any], None], name: str, seconds: dict[str, float], programs: list[Any]
) -> Callable[[Any], None]:
    def timed(artifact: Any) -> None:
        if name == "TO_EXECUTORCH":
            started = time.perf_counter()
            programs.append(copy.deepcopy(artifact.data.exported_program()))
            seconds[INSTRUMENTATION] = time.perf_counter() - started
        started = time.perf_counter()
        run(artifact)
        seconds[name] = seconds.get(name, 0.0) + time.perf_counter() - started

    return timed


@contextlib.contextmanager
def _record_vela_calls() -> Iterator[tuple[list[Any], dict[bytes, bytes]]]:
    """Record what the peer compiles: Vela's report of each delegate, and the TOSA flatbuffer of each payload."""
    from ethosu import regor
    from executorch.backends.arm.ethosu import backend

    reports: list[Any] = []
    flatbuffers: dict[bytes, bytes] = {}
    compile_network, compile_stream = regor.compile, backend.vela_compile

    def compile_and_record(*args: Any, **kwargs: Any) -> Any:
        compiled = compile_network(*args, **kwargs)
        reports.append(compiled.perf_report)
        return compiled

    def stream_and_record(flatbuffer: bytes, *args: Any, **kwargs: Any) -> Any:
        compiled = compile_stream(flatbuffer, *args, **kwargs)
        flatbuffers[compiled.processed_bytes] = flatbuffer
        return compiled

    regor.compile, backend.vela_compile = compile_and_record, stream_and_record
    try:
        yield reports, flatbuffers
    finally:
        regor.compile, backend.vela_compile = compile_network, compile_stream


def _delegates(program: Any) -> list[Any]:
    """The lowered modules of a lowered edge program, in the order in which they are called."""
    module = program.graph_module
    return [
        getattr(module, node.args[0].target)
        for node in module.graph.nodes
        if node.op == "call_function" and str(node.target) == "executorch_call_delegate"
    ]


def _partition(program: Any) -> Row:
    """Counts the delegates of a lowered edge program, and names the operators outside of them."""
    outside = Counter(
        str(getattr(node.target, "_op", node.target))
        for node in program.graph_module.graph.nodes
        if node.op == "call_function"
        and str(node.target) != "executorch_call_delegate"
        and not any(word in str(node.target) for word in BOUNDARY)
    )
    delegates = len(_delegates(program))
    return {"delegates": delegates, "cpu_operators": dict(outside), "cpu_count": sum(outside.values())}


def run_lowered(program: Any, inputs: Inputs, flatbuffers: dict[bytes, bytes]) -> Any:
    """Executes a lowered edge program: delegates on the TOSA reference model, the rest with PyTorch.

    A delegate whose payload is not itself a TOSA flatbuffer is looked up by it in ``flatbuffers``.
    """
    import torch
    from torch import fx

    class Host(fx.Interpreter):
        def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
            if str(target) != "executorch_call_delegate":
                name = str(target)
                if "cortex_m" in name and "quantize_per_tensor" in name:
                    import executorch.backends.cortex_m.ops.operators  # noqa: F401  registers their eager form
                return super().call_function(target, args, kwargs)
            payload = bytes(args[0].processed_bytes)
            arrays = [value.detach().contiguous().numpy() for value in args[1:]]
            return _reference(flatbuffers.get(payload, payload), arrays)

    with torch.no_grad():
        return Host(program.module(check_guards=False)).run(*inputs)


def _reference(flatbuffer: bytes, arrays: list[Any]) -> list[Any]:
    import torch
    import tosa_reference_model

    with _suppress_native_output():
        outputs, status = tosa_reference_model.run(flatbuffer, arrays)
    if status != tosa_reference_model.GraphStatus.TOSA_VALID:
        raise RuntimeError(f"the TOSA reference model returned {status}")
    return [torch.from_numpy(output) for output in outputs]


def compute_accuracy(expected: list[Any], actual: list[Any]) -> Row:
    """SQNR in dB over all samples, and the largest error relative to the largest value."""
    import torch

    reference = torch.cat([value.flatten().double() for value in expected])
    error = torch.cat([value.flatten().double() for value in actual]) - reference
    power = float((error**2).sum())
    ratio = 10 * math.log10(float((reference**2).sum()) / power) if power else math.inf
    return {"sqnr_db": ratio, "max_relative_error": float(error.abs().max() / reference.abs().max())}


@contextlib.contextmanager
def _suppress_native_output() -> Iterator[None]:
    """Redirect stdout and stderr of native code to /dev/null."""
    sys.stdout.flush()
    saved = [os.dup(stream) for stream in (1, 2)]
    with open(os.devnull, "w") as sink:
        for stream in (1, 2):
            os.dup2(sink.fileno(), stream)
    try:
        yield
    finally:
        for stream, copy in zip((1, 2), saved, strict=True):
            os.dup2(copy, stream)
            os.close(copy)


def processor_seconds() -> float:
    """User and system processor time of this process and its child processes."""
    own = psutil.Process()
    times = [process.cpu_times() for process in (own, *own.children())]
    return sum(time.user + time.system + time.children_user + time.children_system for time in times)


def child(model: str, recipe: str, backend: str, clock: str) -> None:
    """Runs one measurement and prints its row as the last line of standard output.

    Args:
        clock: ``wall``, or ``processor`` to count all seconds as ``processor_seconds`` does.
    """
    warnings.simplefilter("ignore")
    if clock == "processor":
        time.perf_counter = processor_seconds
    row: Row = {"model": model, "recipe": recipe, "backend": backend}
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            row.update(measure(model, recipe, backend))
    except Exception as error:  # a failed export is a result too
        root: BaseException = error
        while root.__cause__ is not None:
            root = root.__cause__
        row["error"] = f"{type(root).__name__}: {str(root).strip()[:400]}"
        traceback.print_exc()
    print(json.dumps(row))


# --- the parent: one child after the other, then the tables


def collect(model: str, recipe: str, backend: str, clock: str, timeout: float) -> Row:
    """Starts one measurement and returns its row, also for a failure or after ``timeout`` seconds."""
    command = [sys.executable, __file__, "--child", model, recipe, backend, clock]
    # The peer looks for the VGF converter on the PATH.
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PATH": path}
    # pip compiled the peer's sources when it installed them; ours are compiled when they are first imported.
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    failed: Row = {"model": model, "recipe": recipe, "backend": backend}
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, env=environment)
    except subprocess.TimeoutExpired:
        return {**failed, "error": f"took more than {timeout:g} s"}
    error = f"exit status {done.returncode}: {done.stderr.strip()[-400:]}"
    return parse_printed_row(done.stdout) or {**failed, "error": error}


def medians(rows: Iterable[Row]) -> dict[tuple[str, str, str], Row]:
    """Join the repeats of each measurement: medians of seconds; other figures of the first successful one."""
    groups: dict[tuple[str, str, str], list[Row]] = {}
    for row in rows:
        groups.setdefault((row["model"], row["recipe"], row["backend"]), []).append(row)
    joined: dict[tuple[str, str, str], Row] = {}
    for key, repeats in groups.items():
        good = [row for row in repeats if "error" not in row]
        if not good:
            joined[key] = repeats[-1]
            continue
        names = sorted({name for row in good for name in row["stages_s"]})
        joined[key] = {
            **good[0],
            "repeats": len(good),
            "import_s": statistics.median(row["import_s"] for row in good),
            "total_s": statistics.median(row["total_s"] for row in good),
            "stages_s": {name: statistics.median(row["stages_s"].get(name, 0.0) for row in good) for name in names},
        }
    return joined


def lowering_seconds(row: Row) -> float:
    """Seconds between the quantized model and the lowered edge program."""
    return sum(row["stages_s"].get(name, 0.0) for name in LOWERING)


def format_table(rows: Iterable[Row]) -> str:
    """Format the results as Markdown: the figures of each backend, and the ratios of ours to the peer's."""
    joined = medians(rows)
    head = (
        "| model | recipe | backend | quantize s | export s | lower s | edge s | emit s | total s "
        "| delegates | on CPU | cycles | bytes | SQNR dB |"
    )
    lines = [head, "|" + "---|" * 14]
    for model, recipe in dict.fromkeys(key[:2] for key in joined):
        pair = [joined.get((model, recipe, backend)) for backend in BACKENDS]
        lines += [_line(row) for row in pair if row is not None]
        if all(row is not None and "error" not in row for row in pair):
            lines.append(_ratios(pair[0] or {}, pair[1] or {}))
    imports = {b: [r["import_s"] for k, r in joined.items() if k[2] == b and "import_s" in r] for b in BACKENDS}
    for backend, seconds in imports.items():
        if seconds:
            lines.append(f"\nImport of {backend} after torch and executorch.export: {statistics.median(seconds):.2f} s")
    return "\n".join(lines)


def _line(row: Row) -> str:
    start = f"| {row['model']} | {row['recipe']} | {row['backend']} "
    if "error" in row:
        return start + f"| {row['error'].splitlines()[0][:160].replace('|', '/')} " + "| " * 10 + "|"
    stages = row["stages_s"]
    cells = [
        *(f"{stages.get(name, 0.0):.2f}" for name in ("QUANTIZE", *LOWERING)),
        *(f"{stages.get(name, 0.0):.2f}" for name in ("EDGE_PROGRAM_MANAGER_TRANSFORM", "TO_EXECUTORCH")),
        f"{row['total_s']:.2f}",
        str(row["delegates"]),
        str(row["cpu_count"]),
        f"{row['cycles']:,}" if row.get("cycles") else "",
        f"{row['pte_bytes']:,}",
        f"{row['sqnr_db']:.1f}" if "sqnr_db" in row else "",
    ]
    return start + "| " + " | ".join(cells) + " |"


def _ratios(peer: Row, ours: Row) -> str:
    cycles = f"{ours['cycles'] / peer['cycles']:.3f}" if peer.get("cycles") and ours.get("cycles") else ""
    sqnr = f"{ours['sqnr_db'] - peer['sqnr_db']:+.1f} dB" if "sqnr_db" in peer and "sqnr_db" in ours else ""
    faster = lowering_seconds(peer) / max(lowering_seconds(ours), 1e-9)
    quantize = [row["stages_s"].get("QUANTIZE", 0.0) for row in (ours, peer)]
    cells = [
        f"{quantize[0] / quantize[1]:.2f}" if quantize[1] > 0.01 else "",
        f"export+lower {faster:.1f}x faster",
        "",
        "",
        "",
        f"{ours['total_s'] / peer['total_s']:.2f}",
        "",
        "",
        cycles,
        f"{ours['pte_bytes'] / peer['pte_bytes']:.3f}",
        sqnr,
    ]
    return f"| {peer['model']} | {peer['recipe']} | **ratio** | " + " | ".join(cells) + " |"


def main() -> None:
    """Runs the measurements that the arguments select and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", help="names of the zoo (default: all)")
    parser.add_argument("--recipes", nargs="+", default=list(DEFAULT_RECIPES), choices=RECIPES)
    parser.add_argument("--backends", nargs="+", default=list(BACKENDS), choices=BACKENDS)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument(
        "--clock", default="wall", choices=("wall", "processor"), help="processor: for a machine with other load"
    )
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds for one measurement")
    parser.add_argument("--out", type=Path, help="file that the rows are appended to, as JSON lines")
    parser.add_argument("--table", type=Path, nargs="+", help="print the table of earlier rows, and measure nothing")
    parser.add_argument("--child", nargs=4, metavar=("MODEL", "RECIPE", "BACKEND", "CLOCK"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        child(*arguments.child)
        return
    if arguments.table:
        print(format_table(read_rows(*arguments.table)))
        return

    from tests.models import zoo

    measured: list[Row] = []
    for repeat in range(arguments.repeats):
        for model in arguments.models or zoo.NAMES:
            for recipe in arguments.recipes:
                for backend in arguments.backends:
                    row = {**collect(model, recipe, backend, arguments.clock, arguments.timeout), "repeat": repeat}
                    measured.append(row)
                    state = row.get("error") or f"{row['total_s']:.1f} s"
                    print(f"{model} {recipe} {backend}: {state.splitlines()[0]}", file=sys.stderr, flush=True)
                    add_row(arguments.out, row)
    print(format_table(measured))


if __name__ == "__main__":
    main()
