"""Post-training quantization (PTQ) of an exported program, in place.

With the same annotations, torchao's ``prepare_pt2e``, calibration and ``convert_pt2e`` give the same result: quantize
and dequantize operators replace the observers. The modules of ``algorithms`` also change the graph, the
annotations and the observers. The graph is edited directly: no module is built, traced or exported again.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, cast

import torch
from torch import Tensor
from torch._guards import detect_fake_mode
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, OutputSpec
from torch.fx import Graph, Node
from torch.utils import _pytree as pytree
from torchao.quantization.pt2e import prepare
from torchao.quantization.pt2e.quantizer import Quantizer, SharedQuantizationSpec
from torchao.quantization.pt2e.utils import is_per_channel

from arm_backend_core import compilation_log
from arm_backend_core.aten.functionalize import functionalize_program
from arm_backend_core.graph_edits import add_buffer_node, eliminate_dead_code
from arm_backend_core.nodes import BRANCH_SELECT, is_state, source_location
from arm_backend_core.program import TensorIdentity, tensor_identity
from arm_backend_core.quantization.algorithms.activation_precision import choose_activation_precision
from arm_backend_core.quantization.algorithms.concat_scales import ConcatScales
from arm_backend_core.quantization.algorithms.fold_constant_adds import fold_constant_adds
from arm_backend_core.quantization.algorithms.fuse_decomposed_norms import fuse_log_softmax, fuse_norms
from arm_backend_core.quantization.algorithms.mask_bounds import MaskBounds
from arm_backend_core.quantization.algorithms.mask_fill import bound_mask_fill
from arm_backend_core.quantization.annotator import ANNOTATION
from arm_backend_core.quantization.graph_interpreter import Branch, BranchConditions, find_branch_conditions
from arm_backend_core.quantization.lifting import (
    lift,
    make_fake,
    return_buffer_mutations,
    unlift,
    write_buffer_mutations,
)
from arm_backend_core.quantization.non_finite import NonFiniteError, NonFiniteKind, describe_non_finite, suggest_remedy
from arm_backend_core.quantization.observer import RangeObserver
from arm_backend_core.quantization.observer_interpreter import ObserverInterpreter

_Q = torch.ops.quantized_decomposed
CHUNK_ELEMENTS = 1 << 16  #: Number of elements of a constant that algorithms process at a time.


@dataclass
class SharedTensors:
    """Tensors that several programs share.

    Attributes:
        states: {identity of a buffer: copy of the buffer}. Calibration writes the copies.
        constants: {(observer, identity of a float parameter): quantized parameter}.
    """

    states: dict[TensorIdentity, Tensor] = field(default_factory=dict)
    constants: dict[tuple[Any, TensorIdentity], Tensor] = field(default_factory=dict)


@dataclass
class LastSample:
    """The last calibration sample.

    Attributes:
        inputs: leaves of the inputs.
        results: values of the output node.
        states: (buffer, copy of its values before the sample) pairs.
    """

    inputs: list[Any] = field(default_factory=list)
    results: list[Any] = field(default_factory=list)
    states: Sequence[tuple[Tensor, Tensor]] = ()

    def reset(self) -> list[Any]:
        """Restore the buffers to their values before the sample.

        Returns:
            Copies of the inputs, because a model may write into its inputs.
        """
        for state, before in self.states:
            state.copy_(before)
        return _clone_tensors(self.inputs)


class ObservedProgram(torch.nn.Module):
    """A program with observers: it collects statistics while calibration samples run, and is then quantized.

    The placeholders of its graph are the user's inputs only.

    Args:
        program: from ``torch.export.export``. Its graph is edited; its tensors and the samples do not change.
        quantizer: annotates the program.
        shared: tensors that this program shares with other methods of the model. Each method starts from the state that
            the preceding method leaves. The methods may share observers.
        algorithms: names of quantization algorithms. The constructor applies those that change the graph, the
            annotations or the observers.

    Attributes:
        tensor_ids: {node of a parameter, buffer or constant: identity of its tensor}.
        has_parameters: whether an operator reads a parameter.
        graph_module: the program's module; parameters and buffers are attributes.
        observers: {node: observer of its result, (source, reader): observer of the operand ``source`` of ``reader``}.
        concat_scales: scales of concatenations; the caller calls its ``apply`` between calibration and ``convert``.
        value_hooks: (node, callback) pairs; calibration calls the callback with each value of the node.
        original_values: {attribute name: value before an algorithm replaced it}.
        float_constants: {attribute name: value of a constant before quantization, or of a bias before its correction}.
        ranges: {name of a quantize node: (minimum, maximum) of its operand in calibration}.
        last_sample: the last sample, its results, and the buffers before the sample.

    Raises:
        ModelError: the quantizer cannot annotate this program.
    """

    def __init__(
        self,
        program: ExportedProgram,
        quantizer: Quantizer,
        shared: SharedTensors | None = None,
        algorithms: Collection[str] = (),
    ) -> None:
        super().__init__()
        self._program = program = functionalize_program(program)
        self._fake_mode = detect_fake_mode([node.meta.get("val") for node in program.graph.nodes])
        self._shared = shared or SharedTensors()
        self._input_specs, self.tensor_ids = unlift(self._program, self._shared.states)
        self.has_parameters = any(
            node.users and self._input_specs[str(node.target)].kind is InputKind.PARAMETER for node in self.tensor_ids
        )
        write_buffer_mutations(self._program, self._input_specs)
        fold_constant_adds(self._program.graph_module.graph)
        compilation_log.current_log().add_notes_once(bound_mask_fill(self._program.graph_module))
        fuse_log_softmax(self._program.graph_module)
        fuse_norms(self._program.graph_module, algorithms)
        self.graph_module = quantizer.transform_for_annotation(self._program.graph_module)
        self._in_spec = program.call_spec.in_spec
        quantizer.annotate(self.graph_module)
        choose_activation_precision(self.graph_module.graph, algorithms)
        quantizer.validate(self.graph_module)
        qspecs = prepare._get_edge_or_node_to_qspec(self.graph_module)
        groups = _group_observers(qspecs)
        self.observers: dict[Any, Any] = prepare._get_obs_or_fq_map(groups, qspecs, is_qat=False)
        quantizer.prepare_obs_or_fq_callback(self.graph_module, self.observers)
        self._mask_bounds = MaskBounds(self.graph_module.graph)
        self.value_hooks: list[tuple[Node, Callable[[Tensor], None]]] = self._mask_bounds.value_hooks
        self.concat_scales = ConcatScales(
            self, separate="concat_scales" in algorithms, int16_outputs="int16_outputs" in algorithms
        )
        self.sample_count = 0
        self.last_sample = LastSample()
        self._writes_buffers = bool(self.graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default))
        self._conditions: BranchConditions = find_branch_conditions(self.graph_module.graph)
        self._taken_branches: set[Branch] = set()
        self.meta: dict[str, Any] = {}
        self.original_values: dict[str, Tensor] = {}
        self.float_constants: dict[str, Tensor] = {}
        self.ranges: dict[str, tuple[float, float]] = {}

    @property
    def graph(self) -> Graph:
        """The annotated graph."""
        return self.graph_module.graph

    def forward(self, *args: Any, **keywords: Any) -> None:
        """Observe one sample.

        Raises:
            NonFiniteError: a result or a buffer may depend on NaN or an infinity; the message names sample and tensor.
        """
        ordered = {name: keywords[name] for name in self._in_spec.children()[1].context}
        values = _clone_tensors(pytree.tree_leaves((args, ordered)))  # a model may write into its inputs
        try:
            states = self._shared.states.values() if self._writes_buffers else ()
            self.last_sample = LastSample()  # frees the previous copy first: one copy at a time
            self.last_sample = LastSample(_clone_tensors(values), states=[(state, state.clone()) for state in states])
            self.last_sample.results = self._observe(values)
        except NonFiniteError as error:
            raise NonFiniteError(f"calibration sample {self.sample_count}: {error}", error.kind) from None
        self.sample_count += 1

    @contextmanager
    def preserve_states(self) -> Iterator[None]:
        """Restore the buffers of all programs when the block ends, also after an exception."""
        before = [(state, state.clone()) for state in self._shared.states.values()]
        try:
            yield
        finally:
            for state, value in before:
                state.copy_(value)

    @property
    def output_specs(self) -> list[OutputSpec]:
        """Specs of the program's outputs: new values of inputs and buffers, then the results."""
        return list(self._program.graph_signature.output_specs)

    def convert(self, inspect: Callable[[ObservedProgram], None] = lambda _: None) -> ExportedProgram:
        """Insert quantize and dequantize operators and return the program; can be called only once.

        Args:
            inspect: called with this object after the insertion, while parameters and buffers are still attributes.
        """
        graph = self.graph_module.graph
        self.finish_calibration()
        for node in list(graph.nodes):
            users, output = list(node.users), self.observers.get(node)
            source = node if output is None else self._insert_quantize_dequantize(node, node, output, users)
            readers: dict[Any, list[Node]] = {}
            for user in users:
                observer = self.observers.get((node, user))
                if observer is not None and observer is not output:
                    readers.setdefault(observer, []).append(user)
            for observer, group in readers.items():
                self._insert_quantize_dequantize(node, source, observer, group)
        for node in graph.nodes:
            node.meta.pop(ANNOTATION, None)
        eliminate_dead_code(graph)
        inspect(self)
        return_buffer_mutations(self._program)
        return lift(self._program, self._input_specs, self._fake_mode)

    def finish_calibration(self) -> None:
        """Calibrate the branches that no sample takes, and lower mask bounds that are too high for the scores."""
        self._observe_untaken_branches()
        self._mask_bounds.apply(self.observers)

    def _observe_untaken_branches(self) -> None:
        """Calibrate the branches that no sample takes, with the last sample."""
        selects = [node for node in self.graph.nodes if BRANCH_SELECT in node.meta]
        sides = {(select, side) for select in selects for side in (True, False)}
        untaken = {branch for branch in sides if branch not in self._taken_branches}
        for line, side in sorted({(source_location(select), side) for select, side in untaken}):
            which = f"the {'first' if side else 'second'} branch of a torch.cond{line and f' ({line})'}"
            note = f"no calibration sample takes {which}: calibrate with a sample that takes it"
            compilation_log.current_log().notes.append(note)
        self._conditions = {}  # computes all branches, and a select returns one that was not taken yet
        while self.sample_count and not sides <= self._taken_branches:
            self._observe(self.last_sample.inputs)

    def _observe(self, inputs: Iterable[Any]) -> list[Any]:
        """Run a sample and return its results. Observers see every tensor, but each constant in one sample only."""
        callbacks_by_node: dict[Node, dict[Callable[[Tensor], Any], None]] = {}
        for edge_or_node, observer in self.observers.items():
            if isinstance(observer, RangeObserver) and not (observer.is_constant and observer.count):
                node = edge_or_node if isinstance(edge_or_node, Node) else edge_or_node[0]
                callbacks_by_node.setdefault(node, {})[observer] = None
        for node, hook in self.value_hooks:
            callbacks_by_node.setdefault(node, {})[hook] = None
        run = ObserverInterpreter(self.graph_module, callbacks_by_node, self._conditions, self._taken_branches)
        results = run.run(inputs)
        if run.problems:
            self._check_unused_nonfinite(run.problems, run.finite_ranges, results)
        return results

    def _check_unused_nonfinite(
        self, problems: Mapping[Node, NonFiniteKind], ranges: Mapping[Node, tuple[float, float]], results: Sequence[Any]
    ) -> None:
        """Accept NaN and infinities on which no result depends, such as x / y with y = 0 behind a ``where``.

        The sample runs up to three more times: with these values unchanged, with the finite minimum and with the finite
        maximum in their place. If the results equal ``results``, a note replaces the error.

        Args:
            ranges: {node with non-finite values: (minimum, maximum) of its finite values}.
            results: results with finite values in place of the non-finite ones.

        Raises:
            NonFiniteError: the results depend on the value, or the program writes buffers, which may depend on it.
        """
        texts = [describe_non_finite(node, kind, self._input_specs) for node, kind in problems.items()]
        node, kind = next(iter(problems.items()))
        first = NonFiniteError(f"{texts[0]}: {suggest_remedy(node, kind)}", kind)
        if self.graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default):
            raise first
        fills: list[dict[Node, float]] = [
            {},
            *({node: finite_range[i] for node, finite_range in ranges.items()} for i in (0, 1)),
        ]
        for fill in fills:
            inputs = _clone_tensors(self.last_sample.inputs)
            run = ObserverInterpreter(self.graph_module, {}, self._conditions, self._taken_branches, fill)
            if not _are_close(results, run.run(inputs)):
                raise first
        compilation_log.current_log().add_notes_once(
            f"in calibration {text}; no result depends on it, so its range covers only its finite values"
            for text in texts
        )

    def _insert_quantize_dequantize(self, node: Node, source: Node, observer: Any, users: list[Node]) -> Node:
        """Insert quantize and dequantize between ``source`` and ``users``; a constant is quantized immediately.

        Args:
            source: ``node``, or its dequantized value if its result is already quantized.

        Returns:
            The dequantize node.
        """
        graph, model = self.graph_module.graph, self.graph_module
        # "unbacked_bindings" declares data-dependent sizes, so only the operator that creates the sizes may have it.
        meta = {name: x for name, x in node.meta.items() if name not in (BRANCH_SELECT, "unbacked_bindings")}
        scale, zero_point = observer.calculate_qparams()
        range_and_dtype = (observer.quant_min, observer.quant_max, observer.dtype)
        insertion_point = source.next
        while insertion_point.op == "placeholder":
            insertion_point = insertion_point.next
        with graph.inserting_before(insertion_point):
            if is_per_channel(observer.qscheme):
                quantize, dequantize = _Q.quantize_per_channel.default, _Q.dequantize_per_channel.default
                qparams: tuple[Any, ...] = (scale, zero_point, observer.ch_axis, *range_and_dtype)
                parameters = (*(add_buffer_node(model, f"{node.name}_{i}", qparams[i]) for i in range(2)), *qparams[2:])
            else:
                quantize, dequantize = _Q.quantize_per_tensor.default, _Q.dequantize_per_tensor.default
                qparams = parameters = (float(scale), int(zero_point), *range_and_dtype)
            if source.op == "get_attr" and not is_state(source):
                tensor = attrgetter(str(source.target))(model)
                constants, key = self._shared.constants, (observer, tensor_identity(tensor))
                if key not in constants:
                    constants[key] = _quantize_constant(quantize, tensor, qparams, observer.dtype)
                integers = add_buffer_node(model, f"{node.name}_quantized", constants[key])
                self.float_constants[str(integers.target)] = self.original_values.get(
                    str(source.target), tensor
                ).detach()
            else:
                integers = graph.call_function(quantize, (source, *parameters))
                integers.meta = {**meta, "val": make_fake(self._fake_mode, meta["val"], observer.dtype)}
                if isinstance(observer, RangeObserver):
                    self.ranges[integers.name] = observer.extremes
            result = graph.call_function(dequantize, (integers, *parameters))
            result.meta = dict(meta)
        for user in users:
            user.replace_input_with(source, result)
        return result


def _clone_tensors(values: Iterable[Any]) -> list[Any]:
    return [x.clone() if isinstance(x, Tensor) else x for x in values]


def _are_close(results: Iterable[Any], others: Iterable[Any]) -> bool:
    """Whether results are finite and equal within tolerances (rtol 1e-4, atol 1e-6)."""
    pairs = [(x, y) for x, y in zip(results, others, strict=True) if isinstance(x, Tensor)]
    return all(bool(y.isfinite().all()) and torch.allclose(x, y, 1e-4, 1e-6) for x, y in pairs)


#: Fields of a quantization spec that torchao compares: readers of a tensor with equal specs share an observer.
_SPEC_FIELDS = ("dtype", "is_dynamic", "quant_min", "quant_max", "qscheme", "ch_axis", "scale", "zero_point")


def _group_observers(qspecs: dict[Any, Any]) -> dict[Any, int]:
    """Assign each observed node and edge the number of its observer, as torchao does, with fewer comparisons.

    torchao compares each reader of a tensor with every other reader. This function therefore passes to torchao only the
    first of the readers with equal specs. A spec that refers to an omitted reader is changed to refer to the first
    reader. torchao follows a chain of shared scales recursively, so the recursion limit is raised.
    """
    first: dict[Any, Any] = {}
    duplicates: dict[Any, Any] = {}
    for edge_or_node, spec in qspecs.items():
        is_separate = isinstance(edge_or_node, Node) or isinstance(spec, SharedQuantizationSpec)
        if not is_separate and edge_or_node[1].meta[ANNOTATION].allow_implicit_sharing:
            key = (edge_or_node[0], type(spec), *(str(getattr(spec, name, None)) for name in _SPEC_FIELDS))
            if first.setdefault(key, edge_or_node) != edge_or_node:
                duplicates[edge_or_node] = first[key]
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(limit + 2 * len(qspecs))
    try:
        unique = {
            edge_or_node: SharedQuantizationSpec(duplicates[spec.edge_or_node])
            if isinstance(spec, SharedQuantizationSpec) and spec.edge_or_node in duplicates
            else spec
            for edge_or_node, spec in qspecs.items()
            if edge_or_node not in duplicates
        }
        groups: dict[Any, int] = prepare._get_edge_or_node_to_group_id(unique)
    finally:
        sys.setrecursionlimit(limit)
    return {edge_or_node: groups[duplicates.get(edge_or_node, edge_or_node)] for edge_or_node in qspecs}


def _quantize_constant(quantize: Any, tensor: Tensor, qparams: tuple[Any, ...], dtype: torch.dtype) -> Tensor:
    """Quantize a constant in chunks. Without chunks, temporaries take three times the memory of its float values."""
    if tensor.numel() <= CHUNK_ELEMENTS:
        return cast(Tensor, quantize(tensor, *qparams))
    result, (scale, zero_point, *rest) = torch.empty_like(tensor, dtype=dtype), qparams
    is_per_channel = isinstance(scale, Tensor)
    axis = rest[0] if is_per_channel else 0
    chunk_rows = max(1, CHUNK_ELEMENTS * tensor.shape[axis] // tensor.numel())
    for start in range(0, tensor.shape[axis], chunk_rows):
        chunk = slice(start, start + chunk_rows)
        chunk_qparams = (scale[chunk], zero_point[chunk]) if is_per_channel else (scale, zero_point)
        rows = tensor.narrow(axis, start, min(chunk_rows, tensor.shape[axis] - start))
        result.narrow(axis, start, rows.shape[axis]).copy_(quantize(rows, *chunk_qparams, *rest))
    return result
