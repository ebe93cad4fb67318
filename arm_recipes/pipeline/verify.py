"""Verification, ``export(..., verify=True)``: compare the results of a program with a reference.

This module compares Ethos-U delegates with the TOSA reference model. ``verify_kernels`` compares methods that call int8
kernels (Cortex-M) and no delegates.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from arm_backend_core.format_count import format_count
from arm_recipes.pipeline.unlowered_programs import MAX_KEPT_SAMPLES
from arm_recipes.pipeline.verify_kernels import VerificationError, describe_differing_elements, verify_kernels
from arm_recipes.runtime import host_backends
from arm_recipes.runtime.command_origins import describe_with_origin
from arm_recipes.runtime.errors import RunError
from arm_recipes.runtime.ethosu import EthosUDelegate, EthosUStatistics

if TYPE_CHECKING:
    import numpy as np

    from arm_backend_core.compilation_log import BoundaryTensor, DelegateRecord
    from arm_recipes.pipeline.artifact import Artifact
    from arm_recipes.report.record import MethodReport
    from arm_recipes.samples.call_inputs import Inputs

    Array = np.ndarray[Any, Any]

_MAX_LISTED_OPERATORS = 12


def verify_program(result: Artifact, examples: Mapping[str, Sequence[Inputs]]) -> None:
    """Run samples, compare the results with a reference, and add notes and emulator statistics to the report.

    The reference of an Ethos-U delegate is the TOSA reference model. The reference of int8 kernels is their NumPy
    implementation (``verify_kernels``).

    Args:
        result: the export. Its report is replaced.
        examples: samples by method. The first ``MAX_KEPT_SAMPLES`` of each method are run.

    Raises:
        VerificationError: an output differs, an operation reads uninitialized memory, or dependent operations are not
            synchronized. The message names the delegate and its operators, or the output of an int8 method.
        RunError: the program cannot run on this machine.
    """
    start = time.perf_counter()
    delegates = {delegate.checksum: delegate for delegate in result.report.delegates if delegate.vela is not None}
    program = result.program()  # a separate instance, because runs may write buffers
    runs = 0
    measured: dict[str, EthosUStatistics] = {}
    for method in result.report.methods if delegates else ():
        for index, sample in enumerate(examples[method.name][:MAX_KEPT_SAMPLES]):
            with host_backends.record_executions() as executions:
                program.execute(*result.to_program_inputs(method, sample), method=method.name)
            for execution in executions:
                if execution.checksum in delegates:
                    delegate = delegates[execution.checksum]
                    _compare_with_reference(method, index, delegate, execution)
                    method_suffix = f" of '{method.name}'" if len(result.report.methods) > 1 else ""
                    measured[delegate.name + method_suffix] = _check_memory_accesses(method, delegate, execution)
                    runs += 1
    counts = f"{format_count(runs, 'execution')} of {format_count(len(delegates), 'delegate')}"
    note = f"verified in {time.perf_counter() - start:.1f} s: {counts}, bit-equal with the TOSA reference model"
    notes = verify_kernels(result, examples, MAX_KEPT_SAMPLES)
    if delegates:
        notes.append(note)
    elif not notes:
        notes.append("verify: the program has neither Ethos-U delegates nor int8 kernels: there is nothing to compare")
    result.report = replace(result.report, notes=(*result.report.notes, *notes), measured=measured)


def _check_memory_accesses(
    method: MethodReport, delegate: DelegateRecord, execution: host_backends.DelegateExecution
) -> EthosUStatistics:
    """Check for reads of uninitialized memory and for data hazards, and return the emulator's statistics.

    If an operation reads such memory or has a data hazard, a device may compute other results than the emulator.
    """
    assert isinstance(execution.delegate, EthosUDelegate)
    try:
        return execution.delegate.measure(execution.inputs, delegate)
    except RunError as error:
        problem = describe_with_origin(error, {delegate.checksum: delegate})
        raise VerificationError(
            f"verify: delegate '{delegate.name}' of method '{method.name}' computes correct outputs in the emulator, "
            f"but may differ on a device: {problem}. Its operators are {_list_operators(delegate)}. "
            "docs/contributors/vela.md lists the known bugs of Vela: report this one, or change these operators"
        ) from error


def _compare_with_reference(
    method: MethodReport, sample: int, delegate: DelegateRecord, execution: host_backends.DelegateExecution
) -> None:
    from arm_backend_core.tosa import reference_model

    inputs = [_view_as(io, array) for io, array in zip(delegate.inputs, execution.inputs, strict=True)]
    expected = reference_model.run(delegate.tosa, inputs)
    for io, array, reference_output in zip(delegate.outputs, execution.outputs, expected, strict=True):
        actual = _view_as(io, array)
        mismatch = describe_differing_elements(actual, reference_output, f"elements of '{io.name}'")
        if mismatch is not None:
            raise VerificationError(
                f"verify: delegate '{delegate.name}' of method '{method.name}' differs from its TOSA graph for sample "
                f"{sample}: {mismatch}. Its operators are {_list_operators(delegate)}. "
                "docs/contributors/vela.md lists the known bugs of Vela: report this one, or change these operators"
            )


def _view_as(io: BoundaryTensor, array: Array) -> Array:
    """View an input or output of a delegate with the dtype and shape of the reference model, which lacks uint8."""
    return array.view("int8" if io.dtype == "uint8" else io.dtype).reshape(io.shape)


def _list_operators(delegate: DelegateRecord) -> str:
    names = [name for name in dict.fromkeys(delegate.operators) if not name.startswith("quantized_decomposed")]
    more = f" and {len(names) - _MAX_LISTED_OPERATORS} more" if len(names) > _MAX_LISTED_OPERATORS else ""
    return ", ".join(names[:_MAX_LISTED_OPERATORS]) + more
