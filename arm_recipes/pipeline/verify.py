"""``export(..., verify=True)``: what Vela compiled, beside the TOSA graphs that it was given."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from arm_recipes._internal.messages import ExportError
from arm_recipes.runtime import plugin
from arm_recipes.runtime.errors import RunError
from arm_recipes.runtime.ethosu import EthosUDelegate, EthosUFigures
from arm_recipes.runtime.ethosu_origins import describe_with_origin

if TYPE_CHECKING:
    import numpy as np

    from arm_backend_core.events import BoundaryTensor, Delegate
    from arm_recipes.pipeline.artifact import Artifact
    from arm_recipes.report.record import MethodReport
    from arm_recipes.samples.sample import Inputs

    Array = np.ndarray[Any, Any]

#: Of each method: the reference model takes a second or more for an inference of a large network.
MOST_SAMPLES = 4
_MOST_OPERATORS = 12


class VerificationError(ExportError):
    """The program of a delegate gives other numbers than the TOSA graph that it was compiled from, or might."""


def check(result: Artifact, examples: Mapping[str, Sequence[Inputs]]) -> None:
    """Run example inputs, and compare each delegate for an Ethos-U with the TOSA reference model; adds a note.

    Args:
        examples: samples by method, of which the first ``MOST_SAMPLES`` are run.

    Raises:
        VerificationError: a number differs, memory is read that nothing has written, or operations are in no order
            that they need; the message names the delegate and its operators.
        RunError: this machine cannot run the program.
    """
    start = time.perf_counter()
    delegates = {delegate.checksum: delegate for delegate in result.report.delegates if delegate.vela is not None}
    program = result.program()  # of its own: it may write buffers
    runs = 0
    measured: dict[str, EthosUFigures] = {}
    for method in result.report.methods if delegates else ():
        for index, sample in enumerate(examples[method.name][:MOST_SAMPLES]):
            with plugin.record_executions() as executions:
                program.run(*result.program_inputs(method, sample), method=method.name)
            for execution in executions:
                if execution.checksum in delegates:
                    delegate = delegates[execution.checksum]
                    _compare(method, index, delegate, execution)
                    which = f" of '{method.name}'" if len(result.report.methods) > 1 else ""
                    measured[delegate.name + which] = _watch(method, delegate, execution)
                    runs += 1
    note = (
        f"verified in {time.perf_counter() - start:.1f} s: {runs} executions of {len(delegates)} delegate(s) gave the "
    )
    note += "numbers of the TOSA reference model"
    if not delegates:
        note = "verify: nothing was compiled for an Ethos-U, so there is nothing to compare"
    result.report = replace(result.report, notes=(*result.report.notes, note), measured=measured)


def _watch(method: MethodReport, delegate: Delegate, execution: plugin.Execution) -> EthosUFigures:
    """What hardware might do otherwise: memory that nothing has written, accesses that nothing keeps in order."""
    assert isinstance(execution.delegate, EthosUDelegate)
    try:
        return execution.delegate.watched(execution.inputs, delegate)
    except RunError as error:
        said = describe_with_origin(error, {delegate.checksum: delegate})
        raise VerificationError(
            f"verify: delegate '{delegate.name}' of method '{method.name}' gives the right numbers here, and may give "
            f"others on a device: {said}. It has {_operators(delegate)}. docs/contributors/vela.md lists the bugs of "
            "Vela that are known: report this one, or change the model there"
        ) from error


def _compare(method: MethodReport, sample: int, delegate: Delegate, execution: plugin.Execution) -> None:
    import numpy as np

    from arm_backend_core.tosa import reference

    inputs = [_as(io, array) for io, array in zip(delegate.inputs, execution.inputs, strict=True)]
    expected = reference.run(delegate.tosa, inputs)
    for io, array, right in zip(delegate.outputs, execution.outputs, expected, strict=True):
        given = _as(io, array)
        wrong = np.argwhere(given != right)
        if not len(wrong):
            continue
        at = tuple(wrong[0].tolist())
        raise VerificationError(
            f"verify: delegate '{delegate.name}' of method '{method.name}' gives other numbers than the TOSA graph "
            f"that it was compiled from, for sample {sample}: {len(wrong):,} of {given.size:,} numbers of '{io.name}', "
            f"the first at {list(at)}: {given[at]} in place of {right[at]}. It has {_operators(delegate)}. "
            "docs/contributors/vela.md lists the bugs of Vela that are known: report this one, or change the "
            "model there"
        )


def _as(io: BoundaryTensor, array: Array) -> Array:
    """Bytes of a delegate's input or output as what they stand for."""
    return array.view(io.dtype).reshape(io.shape)


def _operators(delegate: Delegate) -> str:
    names = [name for name in dict.fromkeys(delegate.operators) if not name.startswith("quantized_decomposed")]
    more = f" and {len(names) - _MOST_OPERATORS} more" if len(names) > _MOST_OPERATORS else ""
    return ", ".join(names[:_MOST_OPERATORS]) + more
