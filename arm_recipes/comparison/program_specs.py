"""Specs of the programs that a comparison executes, from exports and from saved programs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from arm_backend_core.partitioner import ArmPartitioner
from arm_recipes.comparison.intermediate_outputs import instrument_delegates
from arm_recipes.comparison.interpreter_plan import InterpreterPlan, UnsupportedProgramError
from arm_recipes.comparison.worker_job import ProgramSpec
from arm_recipes.pipeline.artifact import Artifact
from arm_recipes.report.record import MethodReport
from arm_recipes.runtime.load import load
from arm_recipes.runtime.program import Program


def make_export_spec(result: Artifact, record: MethodReport, layers: bool | int) -> tuple[ProgramSpec, list[str]]:
    """Make the spec of an export, and notes for the user.

    The spec has an interpreter plan if a plan can represent the program, and instrumented delegates if ``layers`` asks
    for a comparison of layers. The artifact caches the spec, because instrumenting delegates lowers the program again.
    """
    key = record.name, bool(layers)
    if key not in result.comparison_specs:
        result.comparison_specs[key] = _make_export_spec(result, record, compare_layers=bool(layers))
    spec, notes = result.comparison_specs[key]
    return spec, list(notes)


def _make_export_spec(result: Artifact, record: MethodReport, *, compare_layers: bool) -> tuple[ProgramSpec, list[str]]:
    method, float_reference = record.name, result.float_reference
    exported, original = result.exported_programs[method], float_reference.float_programs.get(method)
    spec = ProgramSpec(result.buffer, method, record.inputs, record.outputs, None, (), result.data_file)
    try:
        plan = InterpreterPlan.from_program(exported, original.float_constants if original is not None else {})
    except UnsupportedProgramError as reason:
        note = f"layers are not compared: the captured program has {reason}"
        return spec, [note] if compare_layers else []
    buffers = {name: node for node, name in exported.graph_signature.inputs_to_buffers.items()}
    plan.constants |= {buffers[name]: tensor for name, tensor in float_reference.initial_states[method].items()}
    spec, notes = replace(spec, plan=plan), []
    if original is None and plan.is_quantized:
        notes.append(
            "the model was quantized before export: the reference uses its quantized weights, without other rounding"
        )
    partitioner = next((x for x in float_reference.partitioners.get(method, ()) if isinstance(x, ArmPartitioner)), None)
    if compare_layers and partitioner is not None and record.delegates:
        instrumented_delegates, more_notes = instrument_delegates(
            exported, partitioner, record.delegates, (compared.name for compared in plan.tensors)
        )
        spec, notes = replace(spec, instrumented_delegates=tuple(instrumented_delegates)), [*notes, *more_notes]
    return spec, notes


def make_argument_spec(value: Any, argument: str, method: str, layers: bool | int) -> tuple[ProgramSpec, list[str]]:
    """Make the spec of an argument of ``compare``, with notes.

    Args:
        value: an export or a saved program.
        argument: name of the argument in messages.
        method: method to run.
        layers: as for ``compare``.

    Raises:
        ValueError: the value is neither an export nor a program, or the program has no such method.
    """
    if isinstance(value, Artifact):
        return make_export_spec(value, find_method_report(value, method), layers)
    if not isinstance(value, (Program, str, Path, bytes)):
        raise ValueError(
            f"{argument}: must be an ExportResult or a program (a path, bytes or the result of load), got "
            f"{type(value).__name__}"
        )
    program = value if isinstance(value, Program) else load(value)
    signature = program.signature(method)
    return ProgramSpec(program.data, method, signature.inputs, signature.outputs, None, (), program.data_file), []


def find_method_report(result: Artifact, method: str) -> MethodReport:
    """Find the report of a method.

    Raises:
        ValueError: there is no such method; the message lists the methods.
    """
    methods = {record.name: record for record in result.report.methods}
    if method in methods:
        return methods[method]
    variants = result.shape_variants.get(method)
    hint = (
        f"it has one method per input size: {', '.join(variants.sizes_by_method)}"
        if variants
        else f"it has: {', '.join(methods)}"
    )
    raise ValueError(f"method: the program has no '{method}'; {hint}")


def check_same_interface(a: ProgramSpec, b: ProgramSpec) -> None:
    """Check that two programs can be compared.

    Raises:
        ValueError: they differ in the number of inputs, or in the number or shapes of outputs.
    """
    if len(a.inputs) != len(b.inputs):
        raise ValueError(
            f"b: '{b.method}' takes {len(b.inputs)} inputs in b and {len(a.inputs)} in a; give two programs of one "
            "model"
        )
    shapes_by_program = [[tuple(getattr(info, "shape", ())) for info in spec.outputs] for spec in (a, b)]
    if shapes_by_program[0] != shapes_by_program[1]:
        shapes_a, shapes_b = (
            ", ".join(str(list(shape)) for shape in shapes) or "nothing" for shapes in shapes_by_program
        )
        raise ValueError(f"b: '{b.method}' returns {shapes_b} in b and {shapes_a} in a; give two programs of one model")


def program_name(value: Any) -> str:
    """Name a program in the comparison: the recipe of an export, the path of a saved program, else "a program"."""
    if isinstance(value, Artifact):
        return value.report.recipe.removeprefix("arm_recipes_").upper()
    return f"'{value}'" if isinstance(value, (str, Path)) else "a program"
