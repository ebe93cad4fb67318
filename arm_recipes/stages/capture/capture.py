"""Capture of a model with ``torch.export``. By default, ``strict=True`` is tried only if ``strict=False`` fails."""

from __future__ import annotations

import contextlib
import io
import sys
from collections.abc import Collection, Mapping
from typing import Any

import torch
from executorch.export.stages import PipelineArtifact, TorchExportStage
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor
from torch.export import ExportedProgram
from torch.export.graph_signature import CustomObjArgument, InputKind
from torch.fx import Graph, Node

from arm_backend_core.program import mutated_buffers, store_of, tensor_identity
from arm_recipes._internal.error_location import describe_error
from arm_recipes._internal.errors import ExportError
from arm_recipes._internal.messages import warn
from arm_recipes._internal.tracebacks import keep_user_frames
from arm_recipes.samples.call_inputs import Inputs, register_dataclasses
from arm_recipes.samples.mismatch import describe_input_mismatch
from arm_recipes.samples.operand_dtypes import check_operand_dtypes
from arm_recipes.stages.capture.buffer_aliases import (
    describe_unshareable_buffer,
    mark_read_state_as_mutated,
    merge_buffer_aliases,
)
from arm_recipes.stages.capture.data_dependent_shapes import make_shapes_static
from arm_recipes.stages.capture.trace_constants import (
    TraceConstants,
    ignore_weight_assignments,
    skip_distribution_checks,
    trace_recurrent_layers_by_shape,
)
from arm_recipes.stages.capture.training_mode import describe_training_behavior
from arm_recipes.stages.capture.uint8 import move_casts_outward

#: Part of PyTorch's error message for classes that are not registered as pytree nodes.
_UNREGISTERED_CLASS_MESSAGE = "need to register a pytree for it"
#: Module of the functions that enter and leave a level of ``torch.vmap``.
_VMAP_MODULE = "torch._functorch.predispatch"


class _MutatedBranchBufferError(ValueError):
    """The model branches on a buffer that it mutates.

    Attributes:
        mutated: qualified names of all buffers that the model mutates, and of their aliases that it branches on.
    """

    def __init__(self, message: str, mutated: frozenset[str]) -> None:
        super().__init__(message)
        self.mutated = mutated


class Capture:
    """Captures models with ``torch.export.export``.

    ``strict=False`` runs the model's Python code once. ``strict=True`` interprets the bytecode. This takes about six
    times as long, but captures a few models that ``strict=False`` cannot.

    Args:
        strict: None tries ``strict=False`` first and ``strict=True`` if that fails.

    Attributes:
        notes: one sentence for each method that needed ``strict=True``, and for each kind of training behavior.
    """

    def __init__(self, strict: bool | None) -> None:
        self._strict = strict
        self._early_programs: dict[str, ExportedProgram] = {}
        self.notes: list[str] = []

    def capture_early(
        self, method: str, model: torch.nn.Module, example: Inputs, dynamic_shapes: Any = None
    ) -> ExportedProgram:
        """Capture ``model`` now, and keep the program: the next call with the same ``method`` returns it."""
        self._early_programs[method] = program = self(method, model, example, dynamic_shapes)
        return program

    def __call__(
        self, method: str, model: torch.nn.Module, example: Inputs, dynamic_shapes: Any = None
    ) -> ExportedProgram:
        """Capture ``model``.

        Raises:
            ValueError: an input does not fit the model, so the model raised an exception. The message names the input.
            ExportError: the model raised another exception during tracing.
        """
        if method in self._early_programs:
            return self._early_programs.pop(method)
        strict_first = bool(self._strict)
        buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]

        def restore_buffers() -> None:
            with torch.no_grad():  # tracing may have written to buffers that PyTorch treats as constants
                for buffer, initial in buffers:
                    buffer.copy_(initial)

        def capture(strict: bool) -> ExportedProgram:
            try:
                program = self._export(model, example, dynamic_shapes, strict)
            except _MutatedBranchBufferError as error:
                restore_buffers()
                try:
                    program = self._export(model, example, dynamic_shapes, strict, error.mutated)
                except Exception:
                    raise ValueError(str(error)) from None
            unified = merge_buffer_aliases(program)
            if unified is not program:
                restore_buffers()
            _check_mutated_tensors(method, unified)
            return unified

        try:
            program = capture(strict_first)
        except Exception as error:
            restore_buffers()
            if _UNREGISTERED_CLASS_MESSAGE in str(error) and self._register_output_dataclasses(model, example):
                restore_buffers()
                return self(method, model, example, dynamic_shapes)
            if self._strict is None:
                try:
                    program = capture(True)
                except Exception:
                    # Most failing models fail in both modes. The error of strict=False is easier to understand.
                    pass
                else:
                    self.notes.append(f"method '{method}' was captured with strict=True, as strict=False failed")
                    self.warn_about_training_behavior(method, program)
                    return program
            mismatch = describe_input_mismatch(model, example, f"samples[0] of method '{method}'", error)
            if mismatch is not None:
                raise ValueError(mismatch) from None
            message = describe_error(f"tracing method '{method}'", error, [model])
            raise ExportError(message) from keep_user_frames(error)
        self.warn_about_training_behavior(method, program)
        return program

    def warn_about_training_behavior(
        self, method: str, program: ExportedProgram, *, captured_by_user: bool = False
    ) -> None:
        """Warn about operators of a program that behave as in training mode.

        Args:
            method: name of the method.
            program: the captured program.
            captured_by_user: whether the user captured the program. The model may then have been in training mode.
        """
        for text in describe_training_behavior(program, captured_by_user=captured_by_user):
            note = f"'{method}' {text}"
            self.notes.append(note)
            warn(note)

    @staticmethod
    def _register_output_dataclasses(model: torch.nn.Module, example: Inputs) -> bool:
        """Register unregistered dataclasses in the model's outputs as pytree nodes. Returns whether there were any."""
        with torch.no_grad():
            return register_dataclasses(model(*example, **example.keywords))

    @staticmethod
    def _export(
        model: torch.nn.Module,
        example: Inputs,
        dynamic_shapes: Any,
        strict: bool,
        written_buffers: frozenset[str] = frozenset(),
    ) -> ExportedProgram:
        """Export ``model``. During the trace, the values of ``written_buffers`` (qualified names) are unknown."""
        trace_constants = TraceConstants(model, written_buffers)
        # Strict capture does not support function modes.
        constants_mode = contextlib.nullcontext() if strict else trace_constants
        # On failure, torch prints the partial graph. It is dropped, because the exception has the relevant information.
        redirected_stderr = contextlib.redirect_stderr(io.StringIO())
        with (
            torch.no_grad(),
            ignore_weight_assignments(model),
            skip_distribution_checks(),
            trace_recurrent_layers_by_shape(),
            constants_mode,
            redirected_stderr as captured_stderr,
        ):
            program = torch.export.export(
                model, tuple(example), example.keywords, dynamic_shapes=dynamic_shapes, strict=strict
            )
            if any(getattr(node.target, "__module__", "") == _VMAP_MODULE for node in program.graph.nodes):
                # The graph has calls that enter and leave vmap levels. run_decompositions traces the operators between
                # them.
                program = program.run_decompositions({})
        sys.stderr.write(captured_stderr.getvalue())
        check_operand_dtypes(program.graph)
        simplify_graph(program)
        make_shapes_static(program)
        move_casts_outward(program)
        _check_branch_buffers(program, trace_constants.read_buffers)
        return program


def simplify_graph(program: ExportedProgram) -> None:
    """Simplify a captured graph: remove dead code, ``lift_fresh_copy``, and empty operands of concatenations.

    PyTorch keeps a layer whose result the model discards. If the model catches an operator's exception, PyTorch leaves
    the operator in the graph, without a value. Because targets support neither ``lift_fresh_copy`` nor operands without
    elements, ``lift_fresh_copy`` becomes ``clone``, and ``cat`` loses such operands.
    """
    from arm_backend_core.graph_edits import eliminate_dead_code

    _repair_users(program.graph)
    for node in list(program.graph.nodes):
        results = isinstance(node.target, OpOverload) and node.target._schema.returns
        if results and node.meta.get("val") is None and not node.users:
            program.graph.erase_node(node)
        elif node.target is torch.ops.aten.lift_fresh_copy.default:  # creates a literal in each call
            node.target = torch.ops.aten.clone.default
            node.meta["val"] = node.meta["val"].clone()  # in the trace, it shares memory with the literal
        elif node.target is torch.ops.aten.cat.default:
            operands = [operand for operand in node.args[0] if 0 not in map(_static_size, operand.meta["val"].shape)]
            if 0 < len(operands) < len(node.args[0]):
                node.update_arg(0, operands)
    eliminate_dead_code(program.graph)
    program.graph_module.recompile()


def _repair_users(graph: Graph) -> None:
    """Complete the ``users`` of every node, because PyTorch drops some of them before an autocast region."""
    for node in graph.nodes:
        for source in node.all_input_nodes:
            source.users.setdefault(node)


def _static_size(size: int | torch.SymInt) -> int | None:
    return size if isinstance(size, int) else None


def _check_branch_buffers(program: ExportedProgram, read_buffers: Collection[str]) -> None:
    """Check that calls do not change the buffers whose values the model's Python code reads, for example in branches.

    Raises:
        _MutatedBranchBufferError: the model mutates such a buffer. The message names it.
    """
    if not read_buffers:
        return
    mutated = frozenset(mutated_buffers(program))
    written = {tensor_identity(store_of(program, name)[name]) for name in mutated}
    read = {name: store_of(program, name).get(name) for name in sorted(read_buffers)}
    changed = [name for name, tensor in read.items() if tensor is not None and tensor_identity(tensor) in written]
    if changed:
        raise _MutatedBranchBufferError(
            f"the model branches on its buffer '{changed[0]}', and writes it: a program takes the same branch in each "
            "call; use torch.where or torch.cond, or export the model after the first call has set the buffer",
            mutated | frozenset(changed),
        )


def _check_mutated_tensors(method: str, program: ExportedProgram) -> None:
    """Check that every mutated tensor is a buffer that does not overlap another tensor of the program.

    A mutated tensor that is not a buffer would be a constant of the program. Custom objects are rejected too.

    Raises:
        ValueError: a check failed. The message names the tensors, or the class of the custom object.
    """
    from arm_backend_core.nodes import is_written

    if any(isinstance(x, FakeTensor) for x in (*program.constants.values(), *program.state_dict.values())):
        raise ValueError("the tensor that the model assigns to x.data was lost: compute a new tensor, and use that")
    nodes = {node.name: node for node in program.graph.find_nodes(op="placeholder")}
    for spec in program.graph_signature.input_specs:
        if isinstance(spec.arg, CustomObjArgument):
            name = spec.arg.class_fqn.replace("torch._C.", "torch.")
            raise ValueError(
                f"the model uses a {name}, which a program cannot hold: compute its result in __init__, and "
                "store it with register_buffer()"
            )
        if spec.kind is InputKind.PARAMETER and is_written(nodes[spec.arg.name]):
            raise ValueError(
                f"the model writes into its parameter '{spec.target}': {_advise_against_write(nodes[spec.arg.name])}"
            )
        if spec.kind is InputKind.CONSTANT_TENSOR and is_written(nodes[spec.arg.name]):
            shape = list(nodes[spec.arg.name].meta["val"].shape)
            raise ValueError(
                f"the model writes into a tensor of shape {shape} that is none of its buffers (it is read as "
                f"'{spec.target}'): call register_buffer() with it, so that its value persists between calls"
            )
    if problem := describe_unshareable_buffer({method: program}):
        raise ValueError(problem)


def _advise_against_write(parameter: Node) -> str:
    """Return the advice for a model that writes into the parameter."""
    aliases = [user for user in parameter.users if user.target is torch.ops.aten.detach.default]
    readers = [reader for alias in (parameter, *aliases) for reader in alias.users]
    if any(reader.target is torch.ops.aten.embedding_renorm_.default for reader in readers):
        return (
            "an embedding with max_norm rescales the rows that it reads; rescale all rows before the export, with "
            "embedding.weight.data = torch.renorm(embedding.weight.data, 2.0, 0, embedding.max_norm), and set "
            "embedding.max_norm = None"
        )
    return (
        "compute a new tensor, and use that; or use a buffer, register_buffer(), if the value must persist between "
        "calls; if the model prepares its weights in its first call, call it once before the export"
    )


def mark_shared_state(programs: Mapping[str, ExportedProgram]) -> dict[str, ExportedProgram]:
    """Mark each buffer that one method mutates as mutated in all methods that read it.

    The programs must hold the modules' own buffers, not copies: shared buffers are recognized by their memory.

    Raises:
        ExportError: a mutated buffer overlaps another tensor. The message names both.
    """
    if problem := describe_unshareable_buffer(programs):
        raise ExportError(problem)
    return mark_read_state_as_mutated(programs)


class FastTorchExportStage(TorchExportStage):
    """ExecuTorch's capture stage with ``Capture``. Models that are exported programs are not captured again."""

    def __init__(self, aten_transform_passes: list[Any] | None, capture: Capture) -> None:
        super().__init__(aten_transform_passes)
        self._capture = capture

    def run(self, artifact: PipelineArtifact) -> None:
        """Export every method, then apply the recipe's ATen passes."""
        examples = artifact.get_context("example_inputs")
        shapes = artifact.get_context("dynamic_shapes", {})
        programs = {}
        for method, model in artifact.data.items():
            if isinstance(model, ExportedProgram):
                model = merge_buffer_aliases(model)
            else:
                model = self._capture(method, model, examples[method][0], shapes.get(method))
            for transform in self._aten_transform_passes or []:
                model = transform(method, model)
            programs[method] = model
        self._artifact = artifact.copy_with_new_data(mark_shared_state(programs))
