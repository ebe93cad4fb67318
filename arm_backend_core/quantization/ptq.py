"""Post-training quantization of an exported program, which is edited: no module is made, traced or exported again.

It gives what torchao's ``prepare_pt2e``, a run over the samples and ``convert_pt2e`` give: annotations and observers
are the same, and quantize and dequantize operators take the observers' places.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import Any, cast

import torch
from torch import Tensor
from torch._guards import detect_fake_mode
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.export import ExportedProgram
from torch.export.graph_signature import (
    ExportGraphSignature,
    InputKind,
    InputSpec,
    OutputKind,
    OutputSpec,
    TensorArgument,
)
from torch.fx import Graph, Node
from torch.utils import _pytree as pytree
from torchao.quantization.pt2e import prepare
from torchao.quantization.pt2e.quantizer import Quantizer, SharedQuantizationSpec
from torchao.quantization.pt2e.utils import is_per_channel

from arm_backend_core import events
from arm_backend_core.aten.functionalize import functional
from arm_backend_core.nodes import CHOICE, attribute, drop_unread, held, is_state, source_line
from arm_backend_core.program import Identity, identity, store_of, with_parts
from arm_backend_core.quantization.algorithms.activation_precision import choose_activation_precision
from arm_backend_core.quantization.algorithms.concat_scales import ConcatScales
from arm_backend_core.quantization.algorithms.fold_constant_adds import fold_constant_adds
from arm_backend_core.quantization.algorithms.fuse_decomposed_norms import fuse_log_softmax, fuse_norms
from arm_backend_core.quantization.algorithms.mask_fill import bound_mask_fill
from arm_backend_core.quantization.annotator import ANNOTATION
from arm_backend_core.quantization.graph_interpreter import (
    Branch,
    BranchConditions,
    GraphInterpreter,
    find_branch_conditions,
)
from arm_backend_core.quantization.observer import NonFiniteError, RangeObserver

_Q = torch.ops.quantized_decomposed
_CONSTANT_KINDS = (InputKind.PARAMETER, InputKind.BUFFER, InputKind.CONSTANT_TENSOR)
CHUNK_ELEMENTS = 1 << 16  #: elements of a constant that are worked on in one go


@dataclass
class SharedTensors:
    """Tensors of several programs.

    Attributes:
        states: copies of buffers, which calibration writes, by what they are copies of.
        constants: quantized parameters, by observer and what they are made of.
    """

    states: dict[Identity, Tensor] = field(default_factory=dict)
    constants: dict[tuple[Any, Identity], Tensor] = field(default_factory=dict)


@dataclass
class LastSample:
    """A sample; ``results`` are those of the output, ``states`` buffers and what they held before it."""

    inputs: list[Any] = field(default_factory=list)
    results: list[Any] = field(default_factory=list)
    states: Sequence[tuple[Tensor, Tensor]] = ()

    def reset(self) -> list[Any]:
        """Let buffers hold that again.

        Returns:
            copies of the inputs: a model may write into them.
        """
        for state, before in self.states:
            state.copy_(before)
        return _clone_tensors(self.inputs)

    @contextmanager
    def preserve_states(self) -> Iterator[None]:
        """Let buffers hold at the end what they hold now."""
        now = [(state, state.clone()) for state, _ in self.states]
        yield
        for state, value in now:
            state.copy_(value)


class ObservedProgram(torch.nn.Module):
    """A program that observes its tensors while it runs, and can then be quantized.

    Its graph has the user's inputs alone as placeholders.

    Args:
        program: from ``torch.export.export``. Its graph is edited; its tensors and the samples stay as they were.
        quantizer: annotates it.
        common: what programs that go on from each other's state, and share observers, have in common.
        algorithms: names of improvements, of which those that change the graph, annotations or observers are made here.

    Attributes:
        tensor_ids: nodes of parameters, buffers and constants, and which tensor each is.
        model: the program's module; parameters and buffers are attributes.
        observers: by the node whose result, or by the source and the reader of the operand, that they observe.
        concat_scales: what it concatenates, to be applied after the samples.
        watchers: nodes, and what else is to see the values of each while samples run.
        original_values: attributes that are not what they were in the model, as they were.
        float_constants: once it is quantized, what quantized constants were before, by their names.
        ranges: the least and the largest value of each quantized tensor, by the name of its quantize operator.
        last_sample: the last sample, what the model gave for it, and the buffers as they were before it.

    Raises:
        ModelError: the quantizer cannot annotate this program.
    """

    def __init__(
        self,
        program: ExportedProgram,
        quantizer: Quantizer,
        common: SharedTensors | None = None,
        algorithms: Collection[str] = (),
    ) -> None:
        super().__init__()
        self._program = program = functional(program)
        self._mode = detect_fake_mode([node.meta.get("val") for node in program.graph.nodes])
        self._shared = common or SharedTensors()
        self._specs, self.tensor_ids = _unlift(self._program, self._shared.states)
        _write_states(self._program, self._specs)
        fold_constant_adds(self._program.graph_module.graph)
        bound_mask_fill(self._program.graph_module)
        fuse_log_softmax(self._program.graph_module)
        fuse_norms(self._program.graph_module, algorithms)
        self.model = quantizer.transform_for_annotation(self._program.graph_module)
        self._in_spec = program.call_spec.in_spec
        quantizer.annotate(self.model)
        choose_activation_precision(self.model.graph, algorithms)
        quantizer.validate(self.model)
        places = prepare._get_edge_or_node_to_qspec(self.model)
        groups = _group_observers(places)
        self.observers: dict[Any, Any] = prepare._get_obs_or_fq_map(groups, places, is_qat=False)
        quantizer.prepare_obs_or_fq_callback(self.model, self.observers)
        self.watchers: list[tuple[Node, Callable[[Tensor], None]]] = []
        self.concat_scales = ConcatScales(self, apart="concat_scales" in algorithms, wide="int16_outputs" in algorithms)
        self.samples = 0
        self.last_sample = LastSample()
        self._writes = bool(self.graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default))
        self._conditions: BranchConditions = find_branch_conditions(self.model.graph)
        self._taken_branches: set[Branch] = set()
        self.meta: dict[str, Any] = {}
        self.original_values: dict[str, Tensor] = {}
        self.float_constants: dict[str, Tensor] = {}
        self.ranges: dict[str, tuple[float, float]] = {}

    @property
    def graph(self) -> Graph:
        """The annotated graph."""
        return self.model.graph

    def forward(self, *args: Any, **keywords: Any) -> None:
        """Observe one sample.

        Raises:
            NotFinite: a tensor holds NaN or an infinity; names the sample and the tensor.
        """
        ordered = {name: keywords[name] for name in self._in_spec.children()[1].context}
        # A model may write into its inputs.
        values = _clone_tensors(pytree.tree_leaves((args, ordered)))
        try:
            states = self._shared.states.values() if self._writes else ()
            self.last_sample = LastSample()  # copies of one sample at a time
            self.last_sample = LastSample(_clone_tensors(values), states=[(state, state.clone()) for state in states])
            self.last_sample.results = self._observe(values)
        except NonFiniteError as error:
            raise NonFiniteError(f"calibration sample {self.samples}: {error}") from None
        self.samples += 1

    @property
    def output_specs(self) -> list[OutputSpec]:
        """Of what the program gives: new values of inputs and buffers, then its results."""
        return list(self._program.graph_signature.output_specs)

    def convert(self, see: Callable[[ObservedProgram], None] = lambda _: None) -> ExportedProgram:
        """The program with quantize and dequantize operators; to be asked for once.

        Args:
            see: is shown the graph with these, while parameters and buffers are attributes still.
        """
        graph = self.model.graph
        self.observe_untaken_branches()
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
        drop_unread(graph)
        see(self)
        _return_states(self._program)
        return _lift(self._program, self._specs, self._mode)

    def observe_untaken_branches(self) -> None:
        """What no sample chose gets its ranges from what the last one makes of it."""
        wheres = [node for node in self.graph.nodes if CHOICE in node.meta]
        sides = {(where, side) for where in wheres for side in (True, False)}
        notes, told = events.current().notes, {place for place in sides if place not in self._taken_branches}
        for line, side in sorted({(source_line(where), side) for where, side in told}):
            which = f"the {'first' if side else 'second'} branch of a torch.cond{line and f' ({line})'}"
            notes.append(f"no calibration sample takes {which}: calibrate with one that does")
        self._conditions = {}
        while self.samples and not sides <= self._taken_branches:
            self._observe(self.last_sample.inputs)

    def _observe(self, inputs: Iterable[Any]) -> list[Any]:
        """Run a sample, and give its results; observers see its tensors, and constants once."""
        watched: dict[Node, dict[Callable[[Tensor], Any], None]] = {}
        for place, observer in self.observers.items():
            if isinstance(observer, RangeObserver) and not (observer.is_constant and observer.count):
                watched.setdefault(place if isinstance(place, Node) else place[0], {})[observer] = None
        for node, watcher in self.watchers:
            watched.setdefault(node, {})[watcher] = None
        run = _ObserverInterpreter(self, watched, self._conditions, self._taken_branches)
        found = run.run(inputs)
        if run.problems:
            self._check_unused_nonfinite(run.problems, run.finite_ranges, found)
        return found

    def _check_unused_nonfinite(
        self, problems: Sequence[NonFiniteError], filled: Mapping[Node, tuple[float, float]], found: Sequence[Any]
    ) -> None:
        """What is not finite may be on no scale if it is chosen nowhere (x / y where y is 0): results do without it.

        Args:
            filled: what was not finite, and the ends of its other values.
            found: results with finite values in its place.

        Raises:
            NotFinite: with other values in its place results are others, or what is written into buffers may be.
        """
        if self.graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default):
            raise problems[0]
        ways: list[dict[Node, float]] = [{}, *({node: ends[i] for node, ends in filled.items()} for i in (0, 1))]
        for way in ways:
            inputs = _clone_tensors(self.last_sample.inputs)
            if not _are_close(
                found, _ObserverInterpreter(self, {}, self._conditions, self._taken_branches, way).run(inputs)
            ):
                raise problems[0]
        notes = events.current().notes
        for problem in problems:
            note = f"in calibration {problem}; no result depends on it, and its range is that of its other values"
            if note not in notes:
                notes.append(note)

    def _insert_quantize_dequantize(self, node: Node, source: Node, observer: Any, users: list[Node]) -> Node:
        """Let ``users`` read ``source``, which is ``node`` or rounded already, quantized and dequantized.

        A constant is quantized here and now.
        """
        graph, model = self.model.graph, self.model
        meta = {name: x for name, x in node.meta.items() if name != CHOICE}
        scale, zero_point = observer.calculate_qparams()
        limits = (observer.quant_min, observer.quant_max, observer.dtype)
        place = source.next
        while place.op == "placeholder":
            place = place.next
        with graph.inserting_before(place):
            if is_per_channel(observer.qscheme):
                quantize, dequantize = _Q.quantize_per_channel.default, _Q.dequantize_per_channel.default
                known: tuple[Any, ...] = (scale, zero_point, observer.ch_axis, *limits)
                parameters = (*(attribute(model, f"{node.name}_{i}", known[i]) for i in range(2)), *known[2:])
            else:
                quantize, dequantize = _Q.quantize_per_tensor.default, _Q.dequantize_per_tensor.default
                known = parameters = (float(scale), int(zero_point), *limits)
            if source.op == "get_attr" and not is_state(source):
                tensor = attrgetter(str(source.target))(model)
                constants, key = self._shared.constants, (observer, identity(tensor))
                if key not in constants:
                    constants[key] = _quantize_constant(quantize, tensor, known, observer.dtype)
                integers = attribute(model, f"{node.name}_quantized", constants[key])
                self.float_constants[str(integers.target)] = self.original_values.get(
                    str(source.target), tensor
                ).detach()
            else:
                integers = graph.call_function(quantize, (source, *parameters))
                integers.meta = {**meta, "val": _make_fake(self._mode, meta["val"], observer.dtype)}
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
    """Whether results are finite, and the same but for rounding."""
    pairs = [(x, y) for x, y in zip(results, others, strict=True) if isinstance(x, Tensor)]
    return all(bool(y.isfinite().all()) and torch.allclose(x, y, 1e-4, 1e-6) for x, y in pairs)


#: What torchao compares of what two readers of a tensor want of it: where all is the same they share an observer.
_SPEC_FIELDS = ("dtype", "is_dynamic", "quant_min", "quant_max", "qscheme", "ch_axis", "scale", "zero_point")


def _group_observers(places: dict[Any, Any]) -> dict[Any, int]:
    """Numbers of observers.

    torchao compares each reader of a tensor with every other one: of those that want the same the first is asked about.
    And it follows a chain of equal scales by recursion, as deep as the chain is long.
    """
    first: dict[Any, Any] = {}
    twins: dict[Any, Any] = {}
    named = {want.edge_or_node for want in places.values() if isinstance(want, SharedQuantizationSpec)}
    for place, want in places.items():
        alone = isinstance(place, Node) or place in named or isinstance(want, SharedQuantizationSpec)
        if not alone and place[1].meta[ANNOTATION].allow_implicit_sharing:
            key = (place[0], type(want), *(str(getattr(want, name, None)) for name in _SPEC_FIELDS))
            if first.setdefault(key, place) != place:
                twins[place] = first[key]
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(limit + 2 * len(places))
    try:
        asked = {place: want for place, want in places.items() if place not in twins}
        groups: dict[Any, int] = prepare._get_edge_or_node_to_group_id(asked)
    finally:
        sys.setrecursionlimit(limit)
    return {place: groups[twins.get(place, place)] for place in places}


def _quantize_constant(quantize: Any, tensor: Tensor, known: tuple[Any, ...], dtype: torch.dtype) -> Tensor:
    """A constant, quantized by parts: as a whole it takes three times its floats, and is laid out behind these."""
    if tensor.numel() <= CHUNK_ELEMENTS:
        return cast(Tensor, quantize(tensor, *known))
    result, (scale, zero_point, *limits) = torch.empty_like(tensor, dtype=dtype), known
    each = isinstance(scale, Tensor)
    axis = limits[0] if each else 0
    count = max(1, CHUNK_ELEMENTS * tensor.shape[axis] // tensor.numel())
    for start in range(0, tensor.shape[axis], count):
        part = slice(start, start + count)
        own = (scale[part], zero_point[part]) if each else (scale, zero_point)
        rows = tensor.narrow(axis, start, min(count, tensor.shape[axis] - start))
        result.narrow(axis, start, rows.shape[axis]).copy_(quantize(rows, *own, *limits))
    return result


class _ObserverInterpreter(GraphInterpreter):
    """A run of a sample, watched."""

    def __init__(
        self,
        model: ObservedProgram,
        watched: Mapping[Node, Iterable[Callable[[Tensor], Any]]],
        paths: BranchConditions,
        taken: set[Branch],
        filling: Mapping[Node, float] | None = None,
    ) -> None:
        super().__init__(model.graph, paths, taken)
        self._model, self._watchers, self._fill_values = model.model, watched, filling or {}
        self.problems: list[NonFiniteError] = []
        self.finite_ranges: dict[Node, tuple[float, float]] = {}

    def get_attr(self, node: Node) -> Any:
        return attrgetter(str(node.target))(self._model)

    def on_result(self, node: Node, value: Any) -> Any:
        """The value; with finite ones in the place of others where an observer wants them, which is a problem."""
        watched = self._watchers.get(node, ())
        if node in self._fill_values:
            return torch.where(value.isfinite(), value, self._fill_values[node])
        try:
            for observer in watched:  # those of ranges come first, and the first of them refuses
                observer(value)
        except NonFiniteError as problem:
            self.problems.append(problem)
            known = value[value.isfinite()]
            low, high = map(float, torch.aminmax(known)) if known.numel() else (0.0, 0.0)
            self.finite_ranges[node] = low, high
            value = value.nan_to_num(0.0, high, low)
            for observer in watched:
                observer(value)
        return value


def _unlift(
    program: ExportedProgram, states: dict[Identity, Tensor]
) -> tuple[dict[str, InputSpec], dict[Node, Identity]]:
    """Parameters, buffers and constants become attributes of the program's module.

    Returns:
        how they were declared, by name; and which tensor each is.
    """
    module, graph = program.graph_module, program.graph
    placeholders = graph.find_nodes(op="placeholder")
    first = next(node for node in graph.nodes if node.op != "placeholder")
    specs, held_tensors = {}, {}
    for spec, node in zip(program.graph_signature.input_specs, placeholders, strict=True):
        if spec.kind not in _CONSTANT_KINDS:
            continue
        tensor = store_of(program, str(spec.target))[str(spec.target)].detach()
        held_tensors[node] = key = identity(tensor)
        if spec.kind is InputKind.BUFFER:  # it may be written: calibration writes a copy
            tensor = states.setdefault(key, tensor.clone()) if tensor.numel() else tensor
        node.target = held(module, node.name, tensor)
        node.op = "get_attr"
        first.prepend(node)
        specs[str(node.target)] = spec
    return specs, held_tensors


def _write_states(program: ExportedProgram, specs: dict[str, InputSpec]) -> None:
    """New values of buffers are written into them at the end, so that calibration goes on from sample to sample."""
    attributes = {node.target: node for node in program.graph.find_nodes(op="get_attr")}
    buffers = {spec.target: attributes[name] for name, spec in specs.items()}
    output = program.graph.output_node()
    for spec, value in zip(program.graph_signature.output_specs, output.args[0], strict=True):
        if spec.kind is OutputKind.BUFFER_MUTATION:
            with program.graph.inserting_before(output):
                write = program.graph.call_function(torch.ops.aten.copy_.default, (buffers[spec.target], value))
            write.meta["val"] = value.meta["val"]


def _return_states(program: ExportedProgram) -> None:
    """Undoes ``_write_states``: results that are written come first, in this order."""
    output = program.graph.output_node()
    writes = program.graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default)
    results = pytree.tree_leaves(output.args[0])
    output.args = (tuple(write.args[1] for write in writes) + tuple(results[len(writes) :]),)
    for write in writes:
        program.graph.erase_node(write)


def _lift(program: ExportedProgram, specs: dict[str, InputSpec], mode: FakeTensorMode | None) -> ExportedProgram:
    """The program with its attributes declared as inputs again; those in ``specs`` as they were."""
    module, graph = program.graph_module, program.graph
    attributes: dict[str, Node] = {}
    for node in graph.find_nodes(op="get_attr"):
        if not isinstance(attrgetter(str(node.target))(module), Tensor):
            continue
        if attributes.setdefault(str(node.target), node) is not node:
            node.replace_all_uses_with(attributes[str(node.target)])
            graph.erase_node(node)
    first = next(node for node in graph.nodes if node.op != "get_attr")
    inputs, constants = [], dict(program.constants)
    for name in sorted(attributes, key=lambda name: name not in specs):
        node, tensor = attributes[name], attrgetter(name)(module)
        node.op, node.target = "placeholder", node.name
        node.meta["val"] = _make_fake(mode, tensor, tensor.dtype)
        first.prepend(node)
        argument = TensorArgument(node.name)
        if name in specs:
            inputs.append(replace(specs[name], arg=argument))
        else:
            inputs.append(InputSpec(InputKind.CONSTANT_TENSOR, argument, name, None))
            constants[name] = tensor.detach()
    used = {spec.target for spec in inputs}
    signature = program.graph_signature
    users = [spec for spec in signature.input_specs if spec.kind not in _CONSTANT_KINDS]
    results = pytree.tree_leaves(graph.output_node().args[0])
    outputs = [
        replace(spec, arg=TensorArgument(node.name)) if isinstance(spec.arg, TensorArgument) else spec
        for spec, node in zip(signature.output_specs, results, strict=True)
    ]
    state = {name: tensor for name, tensor in program.state_dict.items() if name in used}
    constants = {name: tensor for name, tensor in constants.items() if name in used}
    return with_parts(program, module, ExportGraphSignature(inputs + users, outputs), state, constants)


def _make_fake(mode: FakeTensorMode | None, like: Tensor, dtype: torch.dtype) -> Tensor:
    """A fake tensor of this shape; PyTorch's own ways to it take half a millisecond."""
    empty = torch.empty_strided(like.shape, like.stride(), dtype=dtype, device="meta")
    return empty if mode is None else FakeTensor(mode, empty, like.device)
