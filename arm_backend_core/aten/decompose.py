"""Composite operators without a record become operators that have one.

A composite is traced on fake tensors, once for every form of its operands; what it consists of is decomposed in its
turn, and the nodes are copied into the program, the rest of which is left alone. Records say what an operator is made
of (``ops/composites``, ``ops/recurrent``); PyTorch's decompositions serve for the rest.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Container, Hashable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import GraphModule, Node
from torch.fx._lazy_graph_module import _use_lazy_graph_module
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

from arm_backend_core.aten import complex_numbers
from arm_backend_core.aten.functionalize import functionalize
from arm_backend_core.errors import InternalError, ModelError, Unsupported, fault
from arm_backend_core.nodes import (
    DECOMPOSITION_REFUSAL,
    TIMESTEP_SLOT,
    constant_nodes,
    drop_unread,
    first_result,
    held,
    in_words,
    is_constant,
    is_implicit,
    mutates,
)
from arm_backend_core.ops.catalog import find_composite, find_record, records
from arm_backend_core.ops.composites import computed_weights
from arm_backend_core.ops.composites.arithmetic import empty_product
from arm_backend_core.ops.composites.movement import OUT_OF_VIEW

aten = torch.ops.aten


def decompose(module: GraphModule, constants: Iterable[Node] = (), *, quantized: bool = False) -> bool:
    """Replace every composite operator without a record by its decomposition.

    Args:
        constants: nodes that are parameters or buffers; what is computed from these alone is left whole.
        quantized: the program is going to be quantized.

    Returns:
        Whether the graph changed.

    Raises:
        ModelError: an operator reads memory by strides, and its operand does not lie there as its shape says.
    """
    for node in module.graph.nodes:  # before operands are replaced by what lies otherwise
        record = find_composite(node)
        if record is not None and record.reads_memory and not _value(module, node.args[0]).is_contiguous():
            raise ModelError(f"{in_words(node)} cannot be exported: {OUT_OF_VIEW}")
    return _Decomposer(quantized).run(module, set(constants))


@dataclass(frozen=True)
class _Fragment:
    """A decomposition, decomposed itself.

    Attributes:
        module: its placeholders are the composite's operands, in order.
        complete: every operator in it has a record or is computed from constants alone.
    """

    module: GraphModule
    complete: bool

    def serves(self, node: Node) -> bool:
        """Whether it gives every result of ``node`` that is used; what it does not give is None."""
        results = self.module.graph.output_node().args[0]
        if not isinstance(results, (tuple, list)):
            return True
        return all(results[cast(int, pick.args[1])] is not None or not pick.users for pick in node.users)


@dataclass
class _Decomposer:
    """Decomposes one program.

    Attributes:
        quantized: whether it is going to be quantized.
        fragments: what was traced so far; None for what cannot be, a refusal where the decomposition does not fit.
        pending: composites that are being traced, so that none is looked for inside itself.
    """

    quantized: bool
    fragments: dict[Hashable, _Fragment | Unsupported | None] = field(default_factory=dict)
    pending: list[OpOverload] = field(default_factory=list)

    def run(self, module: GraphModule, constants: set[Node]) -> bool:
        """Decompose ``module``; ``constants`` grows by what is computed from constants alone."""
        changed = False
        for node in list(module.graph.nodes):
            known = node.op == "get_attr" or is_constant(node, constants)
            if known and not complex_numbers.concerns(node):
                constants.add(node)
            elif (
                _is_composite(node, constants)
                and node.target not in self.pending
                and self._replace(module, node, constants)
            ):
                changed = True
            elif known:
                constants.add(node)
        if changed:
            drop_unread(module.graph)
        return changed

    def _replace(self, module: GraphModule, node: Node, constants: set[Node]) -> bool:
        """Put the decomposition of ``node`` in its place, if there is one worth having."""
        try:
            outputs = self._outputs(_Writer(self, module, node, constants), node)
            if outputs is None:
                return False
            _check(node, outputs)
            outputs = _as_traced(node, outputs)
        except InternalError:
            raise
        except ModelError as error:
            raise ModelError(f"{in_words(node)} cannot be exported: {error}") from error
        except Exception as error:
            what = f"decomposing {node.target} raised {type(error).__name__}: {error}"
            node.meta[DECOMPOSITION_REFUSAL] = error if isinstance(error, Unsupported) else fault(what, error)
            drop_unread(module.graph)  # what was written already
            return False
        _hand_over(node, outputs)
        return True

    def _outputs(self, writer: _Writer, node: Node) -> Any:
        """Nodes of the decomposition's results, written in front of ``node``; None where it is better left whole."""
        if complex_numbers.concerns(node):
            return complex_numbers.on_pairs(node, writer.call_as, writer.constants)
        record = find_composite(node)
        if record is not None and record.emits_nodes:
            return record.decompose(writer.call, *node.args, **node.kwargs)
        rule = self._rule(node, writer.constants)
        if rule is None:
            return None
        sources = list(node.all_input_nodes)
        places = {source: f"operand {i}" for i, source in enumerate(sources)}
        form = repr(torch.fx.map_arg((node.args, node.kwargs), lambda x: places[x]))

        def call(*tensors: Tensor) -> Any:
            known = dict(zip(sources, tensors, strict=True))
            args, kwargs = torch.fx.map_arg((node.args, node.kwargs), lambda x: known[x])
            return rule(*args, **kwargs)

        if record is not None and record.reads_memory:
            form += str([_value(writer.module, source).storage_offset() for source in sources])
        fragment = self.fragment(writer.module, (node.target, form), call, sources, writer.constants)
        if fragment is None or (_alternative(node) and not fragment.complete):
            return None
        if not fragment.serves(node):
            raise Unsupported("it is lowered without its further results (indices), but they are used")
        return writer.copy(fragment.module, sources)

    def _rule(self, node: Node, constants: Container[Node]) -> Callable[..., Any] | None:
        overload = cast(OpOverload, node.target)
        if _is_empty(node):
            return lambda *_, **__: pytree.tree_map(lambda x: torch.zeros(x.shape, dtype=x.dtype), node.meta["val"])
        if _is_product_of_nothing(node):
            return partial(empty_product, node.meta["val"].shape)
        if _has_computed_weight(node, constants):
            return computed_weights.RULES[overload][1]
        record = find_composite(node)
        if record is not None:
            return partial(record.decompose, quantized=self.quantized) if record.takes_quantized else record.decompose
        if overload in torch._decomp.decomposition_table:
            return torch._decomp.decomposition_table[overload]
        return overload.decompose if is_implicit(overload) else None

    def fragment(
        self,
        module: GraphModule,
        name: tuple[Any, ...],
        call: Callable[..., Any],
        sources: Sequence[Node],
        constants: set[Node],
    ) -> _Fragment | None:
        """What ``call`` does on tensors like those of ``sources``, decomposed; None where PyTorch cannot trace its own.

        Args:
            name: with the operands' types and shapes it tells two fragments apart; an operator or function, and more.
        """
        values = [_value(module, source) for source in sources]
        if any(not isinstance(value, Tensor) for value in values):
            return None
        held = [source in constants for source in sources]
        key = (*name, *((str(v.shape), str(v.stride()), v.dtype, h) for v, h in zip(values, held, strict=True)))
        if key not in self.fragments:
            try:
                self.fragments[key] = self._traced(name[0], call, values, held)
            except Unsupported as refusal:
                self.fragments[key] = refusal
        fragment = self.fragments[key]
        if isinstance(fragment, Unsupported):
            raise fragment
        return fragment

    def _traced(
        self, target: Any, call: Callable[..., Any], values: list[Tensor], held: Sequence[bool]
    ) -> _Fragment | None:
        try:
            module = traced(call, values)
            known = constant_nodes(module.graph)  # weights, say, that the operator makes of the unit vectors
            if any(
                node.target is target and _is_composite(node, known) for node in module.graph.nodes if node not in known
            ):
                module = traced(call, values, pre_dispatch=False)  # what PyTorch decomposes in C++ alone
        except Exception as error:  # PyTorch raises of all kinds where it has no rule for these operands
            if isinstance(target, OpOverload) and target not in records() and not isinstance(error, Unsupported):
                return None
            raise
        functionalize(module.graph)
        placeholders = [node for node in module.graph.nodes if node.op == "placeholder"]
        constants = {node for node, known in zip(placeholders, held, strict=True) if known}
        self.pending.append(target)
        self.run(module, constants)
        self.pending.pop()
        for node in module.graph.nodes:
            if mutates(node):
                fails = InternalError if target in records() else Unsupported
                raise node.meta.get(DECOMPOSITION_REFUSAL) or fails(
                    f"{target} is made of writes to memory that others share"
                )
        return _Fragment(module, all(_is_known(node, constants) for node in module.graph.nodes))


@dataclass
class _Writer:
    """Writes nodes in front of ``origin``, as parts of it."""

    decomposer: _Decomposer
    module: GraphModule
    origin: Node
    constants: set[Node]

    def call(self, function: Callable[..., Any], *operands: Node, layer: Node | None = None, **numbers: Any) -> Any:
        """What ``function`` gives, traced once for operands of the same types and shapes.

        Args:
            layer: a weight; the nodes get the same ``TIMESTEP_SLOT`` for it in every call.

        Raises:
            Unsupported: PyTorch cannot trace it.
        """
        place = None if layer is None else (layer.name, function.__name__)
        return self._written((function, repr(numbers)), partial(function, **numbers), operands, place)

    def call_as(self, target: Any, function: Callable[..., Any], *operands: Node) -> Any:
        """The same, of a function that stands for ``target``: if an operator, it may not be in what that gives."""
        return self._written((target, function), function, operands)

    def _written(
        self,
        name: tuple[Any, ...],
        function: Callable[..., Any],
        operands: Sequence[Node],
        place: tuple[str, str] | None = None,
    ) -> Any:
        made = first_result(self.origin)  # what reads no tensor is traced among others, by their mode
        with nullcontext() if operands or not isinstance(made, FakeTensor) else made.fake_mode:
            fragment = self.decomposer.fragment(self.module, name, function, operands, self.constants)
        assert fragment is not None, operands
        return self.copy(fragment.module, operands, place)

    def copy(self, fragment: GraphModule, operands: Sequence[Node], place: tuple[str, str] | None = None) -> Any:
        """Copy a fragment's nodes, with the origin's stack trace; returns the nodes of its results."""
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
                    copy.target = _adopt(self.module, operator.attrgetter(str(node.target))(fragment))
                copy.meta.update(inherited)
                if place is not None:
                    copy.meta[TIMESTEP_SLOT] = *place, position
                copies[node] = copy
                if node.op == "get_attr" or is_constant(copy, self.constants):
                    self.constants.add(copy)
        return torch.fx.map_arg(fragment.graph.output_node().args[0], copies.__getitem__)


def _is_composite(node: Node, constants: Container[Node]) -> bool:
    if node.op != "call_function" or not isinstance(node.target, OpOverload):
        return False
    if node.target.namespace != "aten":
        return find_composite(node) is not None or is_implicit(node.target)
    if _is_empty(node):  # no target has such tensors, and the CPU has no kernels for composites
        return find_record(node) is None
    if node.target is aten.view_as_complex.default:
        return False
    composed = find_record(node) is None or complex_numbers.concerns(node)
    return composed or _is_product_of_nothing(node) or _has_computed_weight(node, constants)


def _is_empty(node: Node) -> bool:
    """Whether no result has elements."""
    shapes = [x.shape for x in pytree.tree_leaves(node.meta.get("val")) if isinstance(x, Tensor)]
    return bool(shapes) and all(all(isinstance(size, int) for size in shape) and 0 in shape for shape in shapes)


def _is_product_of_nothing(node: Node) -> bool:
    """Whether a matrix product sums over no elements: a kernel would leave its result unwritten."""
    if node.target not in (aten.linear.default, aten.mm.default, aten.bmm.default, aten.matmul.default):
        return False
    left = cast(Node, node.args[0]).meta["val"]
    return left.dim() > 0 and left.shape[-1] == 0 and node.meta["val"].numel() > 0


def _has_computed_weight(node: Node, constants: Container[Node]) -> bool:
    """Whether the weight of a layer is computed while the program runs, or is a vector."""
    if node.target not in computed_weights.RULES:
        return False
    places, _ = computed_weights.RULES[node.target]
    if node.target is aten.convolution.default and node.args[6] and node.meta["val"].dim() > 4:
        return True  # transposed, over a volume, which the rule for images does not take
    weights = [weight for weight in node.args[places] if isinstance(weight, Node)]
    vector = node.target is aten.linear.default and any(weight.meta["val"].dim() == 1 for weight in weights)
    return vector or any(weight not in constants for weight in weights)


def _alternative(node: Node) -> bool:
    """Whether PyTorch has a kernel for the operator too.

    Torn apart it would only be slower where parts stay on the CPU, and some parts are no ATen operators: the CPU has no
    kernel for these.
    """
    return find_composite(node) is None and node.target in torch._decomp.decomposition_table


def _is_known(node: Node, constants: set[Node]) -> bool:
    return (
        node.op != "call_function"
        or node in constants
        or node.target is operator.getitem
        or find_record(node) is not None
    )


def _check(node: Node, outputs: Any) -> None:
    """Hold a decomposition to what PyTorch says that ``node`` gives.

    Raises:
        Unsupported: shapes or element types differ; a fault of ours where the decomposition is.
    """
    made = [x and _kind(x.meta["val"]) for x in (outputs if isinstance(outputs, (tuple, list)) else [outputs])]
    expected = node.meta.get("val")
    wanted = [_kind(x) for x in (expected if isinstance(expected, (tuple, list)) else [expected])]
    if any(x is not None and x != y for x, y in zip(made, wanted, strict=True)):
        what = f"the decomposition of {node.target} gives {made} in place of {wanted}"
        raise Unsupported(what) if find_composite(node) is None else fault(what)


def _kind(value: Any) -> tuple[tuple[int, ...], torch.dtype] | None:
    return (tuple(value.shape), value.dtype) if isinstance(value, torch.Tensor) else None


def _as_traced(node: Node, outputs: Any) -> Any:
    """``outputs``, contiguous in memory where the results of ``node`` are: by these their views were traced."""
    if isinstance(outputs, (tuple, list)):
        return [_contiguous(x, traced) for x, traced in zip(outputs, node.meta["val"], strict=True)]
    return _contiguous(outputs, node.meta["val"])


def _contiguous(x: Any, traced: Any) -> Any:
    made = x and x.meta["val"]
    if not isinstance(made, Tensor) or made.is_contiguous() or not traced.is_contiguous():
        return x
    with x.graph.inserting_after(x):
        copy = x.graph.call_function(aten.clone.default, (x,), {"memory_format": torch.contiguous_format})
    copy.meta = {**x.meta, "val": made.contiguous()}
    return copy


def _hand_over(node: Node, outputs: Any) -> None:
    """Let the readers of ``node`` read ``outputs`` instead."""
    if isinstance(outputs, (tuple, list)):
        for pick in list(node.users):
            assert pick.target is operator.getitem, pick
            if pick.users:
                pick.replace_all_uses_with(outputs[cast(int, pick.args[1])])
            node.graph.erase_node(pick)
    else:
        node.replace_all_uses_with(outputs)
    node.graph.erase_node(node)


def traced(call: Callable[..., Any], values: list[Tensor], *, pre_dispatch: bool = True) -> GraphModule:
    """Operators of ``call`` on fake tensors, composites kept whole."""
    values = [value.detach() for value in values]  # a trace tells operands apart by identity, copied nodes share theirs
    mode = next((value.fake_mode for value in values if hasattr(value, "fake_mode")), None)
    with torch.no_grad(), _use_lazy_graph_module(True), mode or nullcontext():
        return make_fx(call, tracing_mode="real" if mode else "fake", pre_dispatch=pre_dispatch)(*values)


def _value(module: GraphModule, node: Node) -> Any:
    if "val" in node.meta:
        return node.meta["val"]
    return operator.attrgetter(str(node.target))(module) if node.op == "get_attr" else None


def _adopt(module: GraphModule, tensor: Tensor) -> str:
    """The name of a constant of a decomposition on the module; it is registered the first time."""
    names = {id(held): name for name, held in module.named_buffers(recurse=False)}
    return names.get(id(tensor)) or held(module, f"_decomposed_constant_{len(names)}", tensor)
