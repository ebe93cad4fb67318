"""Decomposition: replace composite operators by operators that have an operator record (lowering rules).

A composite is traced on fake tensors. The trace is decomposed recursively, and copied into the program. Calls with
operands of equal types, shapes and strides, and equal other arguments, share one trace, the fragment. The decomposition
is in the ``Composite`` record of the operator (``ops/composites``, ``ops/recurrent``), or comes from PyTorch.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Hashable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import GraphModule, Node
from torch.fx._lazy_graph_module import _use_lazy_graph_module
from torch.fx.experimental.proxy_tensor import make_fx

from arm_backend_core.aten import complex_numbers, decomposition_rules
from arm_backend_core.aten.functionalize import functionalize
from arm_backend_core.aten.magnitudes import simplify_squared_magnitudes
from arm_backend_core.errors import InternalError, ModelError, Unsupported, compiler_fault
from arm_backend_core.graph_edits import add_buffer, eliminate_dead_code, replace_node
from arm_backend_core.nodes import (
    DECOMPOSITION_REFUSAL,
    TIMESTEP_SLOT,
    constant_nodes,
    describe_node,
    first_result,
    has_mutable_schema,
    is_constant,
)
from arm_backend_core.ops.catalog import aten_entries, find_composite
from arm_backend_core.ops.composites.movement import READS_BEYOND_VIEW

aten = torch.ops.aten


def decompose(module: GraphModule, constants: Iterable[Node] = (), *, quantized: bool = False) -> bool:
    """Replace the operators that ``needs_decomposition`` selects by their decompositions.

    An operator stays if its decomposition is missing, refuses the operands, or is PyTorch's and contains operators
    without an operator record.

    Args:
        module: the module to edit.
        constants: parameters and buffers. Operators on these alone are not decomposed, except complex operators.
        quantized: whether the program is going to be quantized.

    Returns:
        Whether the graph changed.

    Raises:
        ModelError: an operator reads a non-contiguous operand by strides, or cannot be exported at all.
    """
    for node in module.graph.nodes:  # before replacements change the operands' strides
        record = find_composite(node)
        if record is not None and record.reads_storage_offset and not _value(module, node.args[0]).is_contiguous():
            raise ModelError(f"{describe_node(node)} cannot be exported: {READS_BEYOND_VIEW}")
    rewritten = simplify_squared_magnitudes(module)
    return _Decomposer(quantized).run(module, set(constants)) or rewritten


@dataclass(frozen=True)
class _Fragment:
    """The trace of a composite operator, recursively decomposed.

    Attributes:
        module: its placeholders are the composite's operands, in order.
        is_lowerable: every operator in it has an operator record or is computed from constants alone.
    """

    module: GraphModule
    is_lowerable: bool

    def covers_used_results(self, node: Node) -> bool:
        """Whether the fragment computes every used result of ``node``; a result that it does not compute is None."""
        results = self.module.graph.output_node().args[0]
        if not isinstance(results, (tuple, list)):
            return True
        return all(results[cast(int, getitem.args[1])] is not None or not getitem.users for getitem in node.users)


@dataclass
class _Decomposer:
    """Decomposes one program.

    Attributes:
        quantized: whether the program is going to be quantized.
        fragments: cache. None: PyTorch cannot trace the operator. ``Unsupported``: the decomposition refuses operands.
        in_progress: operators whose fragments are being decomposed. Inside its own fragment, an operator is kept.
    """

    quantized: bool
    fragments: dict[Hashable, _Fragment | Unsupported | None] = field(default_factory=dict)
    in_progress: list[OpOverload] = field(default_factory=list)

    def run(self, module: GraphModule, constants: set[Node]) -> bool:
        """Decompose ``module``; add nodes computed from constants alone to ``constants``. True if the graph changed."""
        changed = False
        for node in list(module.graph.nodes):
            is_known_constant = node.op == "get_attr" or is_constant(node, constants)
            if is_known_constant and not complex_numbers.involves_complex(node):
                constants.add(node)
            elif (
                decomposition_rules.needs_decomposition(node, constants)
                and node.target not in self.in_progress
                and self._replace(module, node, constants)
            ):
                changed = True
            elif is_known_constant:
                constants.add(node)
        if changed:
            eliminate_dead_code(module.graph)
        return changed

    def _replace(self, module: GraphModule, node: Node, constants: set[Node]) -> bool:
        """Replace ``node`` by its decomposition; returns False if ``node`` stays (see the function ``decompose``)."""
        try:
            outputs = self._write_decomposition(_FragmentWriter(self, module, node, constants), node)
            if outputs is None:
                return False
            _check_outputs(node, outputs)
            outputs = _match_traced_layout(node, outputs)
        except InternalError:
            raise
        except ModelError as error:
            raise ModelError(f"{describe_node(node)} cannot be exported: {error}") from error
        except Exception as error:
            description = f"decomposing {node.target} raised {type(error).__name__}: {error}"
            node.meta[DECOMPOSITION_REFUSAL] = (
                error if isinstance(error, Unsupported) else compiler_fault(description, error)
            )
            eliminate_dead_code(module.graph)  # nodes emitted before the error
            return False
        replace_node(node, outputs)
        return True

    def _write_decomposition(self, writer: _FragmentWriter, node: Node) -> Any:
        """Emit the decomposition before ``node``; returns the result nodes, or None to keep the operator."""
        if complex_numbers.involves_complex(node):
            return complex_numbers.decompose_complex(node, writer.call_decomposition, writer.constants)
        record = find_composite(node)
        if record is not None and record.emits_nodes:
            return record.decompose(writer, *node.args, **node.kwargs)
        rule = decomposition_rules.find_decomposition(node, writer.constants, quantized=self.quantized)
        if rule is None:
            return None
        sources = list(node.all_input_nodes)
        operand_names = {source: f"operand {i}" for i, source in enumerate(sources)}
        signature = repr(torch.fx.map_arg((node.args, node.kwargs), lambda x: operand_names[x]))

        def call(*tensors: Tensor) -> Any:
            values = dict(zip(sources, tensors, strict=True))
            args, kwargs = torch.fx.map_arg((node.args, node.kwargs), lambda x: values[x])
            return rule(*args, **kwargs)

        if record is not None and record.reads_storage_offset:
            signature += str([_value(writer.module, source).storage_offset() for source in sources])
        fragment = self.get_fragment(writer.module, (node.target, signature), call, sources, writer.constants)
        is_from_pytorch = decomposition_rules.uses_pytorch_decomposition(node)
        if fragment is None or (is_from_pytorch and not fragment.is_lowerable):
            return None
        if not fragment.covers_used_results(node):
            raise Unsupported(
                "its decomposition does not compute its further results (indices), but the model uses them"
            )
        return writer.copy(fragment.module, sources)

    def get_fragment(
        self,
        module: GraphModule,
        key_prefix: tuple[Any, ...],
        call: Callable[..., Any],
        sources: Sequence[Node],
        constants: set[Node],
    ) -> _Fragment | None:
        """Return the decomposed trace of ``call`` for the types, shapes and strides of ``sources``; it is cached.

        Args:
            module: the module of ``sources``.
            key_prefix: start of the cache key: the operator or function, and its other arguments. Shape, strides and
                type of each operand follow, and whether the operand is constant.
            call: the function to trace.
            sources: the operands.
            constants: nodes that are constant.

        Returns:
            None if an operand is not a tensor, or if PyTorch cannot trace its own decomposition.

        Raises:
            Unsupported: the decomposition refuses the operands.
        """
        values = [_value(module, source) for source in sources]
        if any(not isinstance(value, Tensor) for value in values):
            return None
        are_constant = [source in constants for source in sources]
        key = (
            *key_prefix,
            *((str(v.shape), str(v.stride()), v.dtype, h) for v, h in zip(values, are_constant, strict=True)),
        )
        if key not in self.fragments:
            try:
                self.fragments[key] = self._trace_fragment(key_prefix[0], call, values, are_constant)
            except Unsupported as refusal:
                self.fragments[key] = refusal
        fragment = self.fragments[key]
        if isinstance(fragment, Unsupported):
            raise fragment
        return fragment

    def _trace_fragment(
        self, target: Any, call: Callable[..., Any], values: list[Tensor], are_constant: Sequence[bool]
    ) -> _Fragment | None:
        try:
            module = trace(call, values)
            known = constant_nodes(module.graph)  # computed without operands, for example one-hot weights
            same = [node for node in module.graph.nodes if node.target is target and node not in known]
            if any(decomposition_rules.needs_decomposition(node, known) for node in same):
                module = trace(call, values, pre_dispatch=False)  # PyTorch decomposes some operators in C++ only
        except Exception as error:  # PyTorch raises various types where it has no rule for these operands
            if isinstance(target, OpOverload) and target not in aten_entries() and not isinstance(error, Unsupported):
                return None
            raise
        functionalize(module.graph)
        placeholders = [node for node in module.graph.nodes if node.op == "placeholder"]
        constants = {node for node, known in zip(placeholders, are_constant, strict=True) if known}
        self.in_progress.append(target)
        self.run(module, constants)
        self.in_progress.pop()
        for node in module.graph.nodes:
            if has_mutable_schema(node):
                description = f"{target} decomposes into writes to shared memory"
                is_own_decomposition = target in aten_entries()
                raise node.meta.get(DECOMPOSITION_REFUSAL) or (
                    compiler_fault(description) if is_own_decomposition else Unsupported(description)
                )
        return _Fragment(module, all(decomposition_rules.is_lowerable(node, constants) for node in module.graph.nodes))


@dataclass
class _FragmentWriter:
    """Emits the nodes of a decomposition before ``origin``, with its metadata."""

    decomposer: _Decomposer
    module: GraphModule
    origin: Node
    constants: set[Node]

    def __call__(self, function: Callable[..., Any], *operands: Node, layer: Node | None = None, **kwargs: Any) -> Any:
        """Emit the nodes of ``function``, whose trace ``get_fragment`` caches; returns the nodes of its results.

        Args:
            function: a function of tensors.
            operands: the operand nodes.
            layer: a weight that identifies a recurrent layer. Each call for the same layer and function sets the same
                values of ``TIMESTEP_SLOT``.
            kwargs: keyword arguments of ``function``.

        Raises:
            Unsupported: ``function`` or a decomposition inside it refuses the operands.
        """
        slot = None if layer is None else (layer.name, function.__name__)
        return self._write_traced((function, repr(kwargs)), partial(function, **kwargs), operands, slot)

    def copy_node(self, node: Node, **arguments: Any) -> Node:
        """Emit a copy of an operator that was emitted before, with other values of some arguments.

        Args:
            node: the operator. The results of ``node`` and of the copy have the same type and shape.
            arguments: the new values, by the names of the operator's schema. ``node`` must have positional arguments
                up to the last of these names.
        """
        names = [argument.name for argument in cast(OpOverload, node.target)._schema.arguments]
        with self.module.graph.inserting_before(self.origin):
            copy = self.module.graph.node_copy(node, lambda operand: operand)
        for name, value in arguments.items():
            copy.update_arg(names.index(name), value)
        if node in self.constants:
            self.constants.add(copy)
        return copy

    def call_decomposition(self, target: Any, function: Callable[..., Any], *operands: Node) -> Any:
        """Emit the decomposition ``function`` of ``target``. Inside it, ``target`` is not decomposed again."""
        return self._write_traced((target, function), function, operands)

    def _write_traced(
        self,
        key_prefix: tuple[Any, ...],
        function: Callable[..., Any],
        operands: Sequence[Node],
        slot: tuple[str, str] | None = None,
    ) -> Any:
        result = first_result(self.origin)  # without operands, the trace needs the fake mode of the program
        with nullcontext() if operands or not isinstance(result, FakeTensor) else result.fake_mode:
            fragment = self.decomposer.get_fragment(self.module, key_prefix, function, operands, self.constants)
        assert fragment is not None, operands
        return self.copy(fragment.module, operands, slot)

    def copy(self, fragment: GraphModule, operands: Sequence[Node], slot: tuple[str, str] | None = None) -> Any:
        """Copy the nodes of a fragment, with the trace metadata of ``origin``; returns the nodes of its results."""
        graph = self.module.graph
        placeholders = (node for node in fragment.graph.nodes if node.op == "placeholder")
        copies = dict(zip(placeholders, operands, strict=True))
        inherited: dict[str, Any] = {
            key: self.origin.meta[key]
            for key in ("stack_trace", "nn_module_stack", "source_fn_stack", "from_node", "custom")
            if key in self.origin.meta
        }
        with graph.inserting_before(self.origin):
            for position, node in enumerate(fragment.graph.nodes):
                if node.op in ("placeholder", "output"):
                    continue
                copy = graph.node_copy(node, copies.__getitem__)
                if node.op == "get_attr":
                    copy.target = _register_constant(self.module, operator.attrgetter(str(node.target))(fragment))
                copy.meta.update(inherited)
                if slot is not None:
                    copy.meta[TIMESTEP_SLOT] = *slot, position
                copies[node] = copy
                if node.op == "get_attr" or is_constant(copy, self.constants):
                    self.constants.add(copy)
        return torch.fx.map_arg(fragment.graph.output_node().args[0], copies.__getitem__)


#: Shape and element type of a tensor.
_Signature: TypeAlias = tuple[tuple[int | torch.SymInt, ...], torch.dtype]


def _check_outputs(node: Node, outputs: Any) -> None:
    """Check shapes and element types of a decomposition's results against the fake tensors of ``node``.

    Raises:
        Unsupported: a size of a result depends on data, or the results differ and ``node`` has no ``Composite`` record.
        Fault: the results differ, and ``node`` has a ``Composite`` record.
    """
    actual = [x and _signature(x.meta["val"]) for x in (outputs if isinstance(outputs, (tuple, list)) else [outputs])]
    expected = node.meta.get("val")
    expected_signatures = [_signature(x) for x in (expected if isinstance(expected, (tuple, list)) else [expected])]
    if any(map(_has_data_dependent_size, actual, expected_signatures)):
        raise Unsupported("a size of its result depends on data")
    if any(x is not None and x != y for x, y in zip(actual, expected_signatures, strict=True)):
        description = f"the decomposition of {node.target} gives {actual} in place of {expected_signatures}"
        raise Unsupported(description) if find_composite(node) is None else compiler_fault(description)


def _has_data_dependent_size(actual: _Signature | None, expected: _Signature | None) -> bool:
    """Whether a result has a data-dependent size: its symbol in the trace is not the symbol in the program."""
    if actual is None or expected is None:
        return False
    sizes = [(x, y) for x, y in zip(actual[0], expected[0], strict=False) if isinstance(x, torch.SymInt)]
    return any(isinstance(y, torch.SymInt) and x.node.expr != y.node.expr for x, y in sizes)


def _signature(value: Any) -> _Signature | None:
    return (tuple(value.shape), value.dtype) if isinstance(value, torch.Tensor) else None


def _match_traced_layout(node: Node, outputs: Any) -> Any:
    """Make ``outputs`` contiguous if they replace contiguous results: views of the results rely on this layout."""
    if isinstance(outputs, (tuple, list)):
        return [_make_contiguous(x, traced) for x, traced in zip(outputs, node.meta["val"], strict=True)]
    return _make_contiguous(outputs, node.meta["val"])


def _make_contiguous(x: Any, meta: Any) -> Any:
    value = x and x.meta["val"]
    if not isinstance(value, Tensor) or value.is_contiguous() or not meta.is_contiguous():
        return x
    with x.graph.inserting_after(x):
        copy = x.graph.call_function(aten.clone.default, (x,), {"memory_format": torch.contiguous_format})
    copy.meta = {**x.meta, "val": value.contiguous()}
    return copy


def trace(call: Callable[..., Any], values: list[Tensor], *, pre_dispatch: bool = True) -> GraphModule:
    """Trace ``call`` on fake tensors. With ``pre_dispatch``, the trace keeps composite operators."""
    # Tracing identifies operands by object, but copied nodes share one fake tensor.
    values = [value.detach() for value in values]
    mode = next((value.fake_mode for value in values if hasattr(value, "fake_mode")), None)
    with torch.no_grad(), _use_lazy_graph_module(True), mode or nullcontext():
        return make_fx(call, tracing_mode="real" if mode else "fake", pre_dispatch=pre_dispatch)(*values)


def _value(module: GraphModule, node: Node) -> Any:
    if "val" in node.meta:
        return node.meta["val"]
    return operator.attrgetter(str(node.target))(module) if node.op == "get_attr" else None


def _register_constant(module: GraphModule, tensor: Tensor) -> str:
    """Register a constant of a decomposition on the module, once; returns its name."""
    names = {id(buffer): name for name, buffer in module.named_buffers(recurse=False)}
    return names.get(id(tensor)) or add_buffer(module, f"_decomposed_constant_{len(names)}", tensor)
