"""Verification of int8 kernels: compare the program's outputs with NumPy implementations of the kernels.

The runtime executes the C++ kernels in the planned memory. The reference executes the same calls in NumPy, with the
implementations in ``arm_backend_core.cortex_m``. The reference has no memory plan: each result has separate memory. The
comparison therefore also detects errors of the program's memory plan.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from arm_backend_core.format_count import format_count
from arm_recipes._internal.errors import ExportError
from arm_recipes.report.kernels import BIT_EXACT_OPERATORS, is_kernel_call

if TYPE_CHECKING:
    import numpy as np
    import torch
    from torch.export import ExportedProgram

    from arm_recipes.pipeline.artifact import Artifact
    from arm_recipes.report.record import MethodReport
    from arm_recipes.samples.call_inputs import Inputs

    Array = np.ndarray[Any, Any]


class VerificationError(ExportError):
    """A program computes other values than its reference, reads uninitialized memory, or has a data hazard."""


def verify_kernels(result: Artifact, examples: Mapping[str, Sequence[Inputs]], max_samples: int) -> list[str]:
    """Run samples of each method that calls int8 kernels and no delegates, and compare the outputs. Return notes.

    A method with an operator whose floating-point results depend on the implementation is not compared.

    Args:
        result: the export.
        examples: samples by method.
        max_samples: number of samples of each method to run.

    Raises:
        VerificationError: an output differs. The message names it.
        RunError: the program cannot run on this machine.
    """
    notes, runs, calls = [], 0, 0
    program = result.program()  # a separate instance, because runs may write buffers
    for method in result.report.methods:
        if method.delegates:
            continue
        emitted = result.executorch_program.exported_program(method.name)
        count = sum(map(is_kernel_call, emitted.graph.nodes))
        if not count:
            continue
        inexact = _find_inexact_operator(emitted)
        if inexact is not None:
            notes.append(
                f"verify: '{method.name}' is not compared, because {inexact} computes in floating point on the CPU"
            )
            continue
        reference = _KernelReference(emitted)
        for index, sample in enumerate(examples[method.name][:max_samples]):
            inputs = result.to_program_inputs(method, sample)
            actual = program.execute(*inputs, method=method.name)
            _compare_outputs(method, index, actual, reference.run(inputs))
            runs += 1
        calls += count
    if runs:
        counts = f"{format_count(runs, 'execution')} of {format_count(calls, 'int8 kernel')}"
        notes.append(f"verified: {counts}, bit-equal with their NumPy implementations")
    return notes


class _KernelReference:
    """Executes an emitted program in PyTorch, with NumPy implementations of the kernels.

    Buffers keep their values between runs.

    Args:
        program: a method after memory planning.
    """

    def __init__(self, program: ExportedProgram) -> None:
        from arm_backend_core.program import TENSOR_KINDS, store_of

        self._program = program
        self._tensors = {
            spec.arg.name: store_of(program, spec.target)[spec.target].clone()
            for spec in program.graph_signature.input_specs
            if spec.kind in TENSOR_KINDS and spec.target is not None
        }

    def run(self, inputs: Sequence[Any]) -> list[Any]:
        from torch.fx import Interpreter

        next_inputs = iter(inputs)
        names = [node.name for node in self._program.graph.nodes if node.op == "placeholder"]
        arguments = [self._tensors[name] if name in self._tensors else next(next_inputs) for name in names]
        outputs = Interpreter(self._program.graph_module).run(*arguments)
        return list(outputs) if isinstance(outputs, (tuple, list)) else [outputs]


def _find_inexact_operator(program: ExportedProgram) -> str | None:
    """Find an operator whose float32 results depend on the implementation."""
    from executorch.exir import memory

    for node in program.graph.nodes:
        is_allocation = node.target in (memory.alloc, memory.view)
        if node.op == "call_function" and not is_allocation and _is_float(node) and not _is_exact(node):
            return str(node.target)
    return None


def _is_float(node: torch.fx.Node) -> bool:
    import torch
    from torch.utils import _pytree as pytree

    from arm_backend_core.scalar_kind import ScalarKind, kind_of

    values = pytree.tree_leaves(node.meta.get("val"))
    return any(isinstance(value, torch.Tensor) and kind_of(value.dtype) is ScalarKind.FLOAT for value in values)


def _is_exact(node: torch.fx.Node) -> bool:
    from arm_backend_core.nodes import overload_of

    overload = overload_of(node.target)
    return overload is not None and overload._schema.name in (*BIT_EXACT_OPERATORS, "cortex_m::dequantize_per_tensor")


def _compare_outputs(method: MethodReport, sample: int, actual: Sequence[Any], expected: Sequence[Any]) -> None:
    import torch

    outputs = expected[len(expected) - len(actual) :]  # the new values of buffers come first
    for info, value, reference in zip(method.outputs, actual, outputs, strict=True):
        if not isinstance(value, torch.Tensor):
            continue
        mismatch = describe_differing_elements(value.numpy(), reference.numpy(), "elements")
        if mismatch is not None:
            raise VerificationError(
                f"verify: output '{info.name}' of method '{method.name}' differs from the NumPy reference for sample "
                f"{sample}: {mismatch}. The program or a kernel of this machine is wrong: report this with the model"
            )


def describe_differing_elements(actual: Array, expected: Array, elements: str) -> str | None:
    """Describe the elements that differ; None if none does. ``elements`` names them, for example "elements of 'x'"."""
    import numpy as np

    mismatches = np.argwhere(actual != expected)
    if not len(mismatches):
        return None
    first = tuple(mismatches[0].tolist())
    return (
        f"{len(mismatches):,} of {actual.size:,} {elements}, the first at {list(first)}: {actual[first]} instead of "
        f"{expected[first]}"
    )
