"""Fake-quantized program of a model for fixed input shapes, as quantization-aware training (QAT) runs it.

The program is annotated like the program that ``export`` quantizes, and fake-quantizes the same tensors. Two things
differ: batch norms are folded into the weights again at each step (``ParameterTape``), and training determines scales
and zero points.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor
from torch.export import ExportedProgram
from torch.export.graph_signature import OutputKind
from torch.fx import Node
from torch.utils import _pytree as pytree
from torchao.quantization.pt2e.utils import is_per_channel

from arm_backend_core.aten.layer_affine import FOLDED_AFFINE
from arm_backend_core.ops.catalog import find_record
from arm_backend_core.ops.registry import AnnotationKind
from arm_backend_core.program import TENSOR_KINDS, store_of
from arm_backend_core.quantization.fake_quant.learned_step_size import (
    QuantizationRange,
    ScaleAndZeroPoint,
    fake_quantize,
)
from arm_backend_core.quantization.fake_quant.tape import ParameterTape
from arm_backend_core.quantization.fake_quant.training_layers import TrainingLayers
from arm_backend_core.quantization.graph_interpreter import BranchConditions, GraphInterpreter, find_branch_conditions
from arm_backend_core.quantization.graph_observers import register_bias
from arm_backend_core.quantization.observer import RangeObserver, WeightObserver
from arm_backend_core.quantization.ptq import ObservedProgram


def activation_observers(observed: ObservedProgram) -> list[RangeObserver]:
    """List the observers of activations with a calibrated range, in program order."""
    unique = dict.fromkeys(observed.observers.values())
    return [observer for observer in unique if isinstance(observer, RangeObserver) and not observer.is_constant]


def set_qparams(observer: RangeObserver, parameters: ScaleAndZeroPoint) -> None:
    """Make an observer return this scale and zero point, regardless of the values that it has observed."""
    scale, zero_point = (value.detach().cpu().reshape(1) for value in parameters)
    observer._statistics.parameters = scale.float(), zero_point.round().long()


@dataclass
class StepSettings:
    """Settings of one call of the program: a training step or an evaluation.

    Attributes:
        ranges: ranges of activations, in the order of ``activation_observers``.
        tensors: parameters and buffers of the model, by name.
        training: if True, dropout is active, and the moving averages of ranges that are not learned are updated.
        batch_statistics: whether batch norms normalize by the statistics of the batch.
    """

    ranges: Sequence[QuantizationRange]
    tensors: Mapping[str, Tensor]
    training: bool
    batch_statistics: bool


class FakeQuantProgram:
    """Fake-quantized program for fixed input shapes.

    Args:
        program: from ``torch.export.export``; its graph is edited.
        observe: function that annotates the program and inserts observers, as an export does.

    Attributes:
        observed: the annotated program.
        weighted_nodes: operators with a weight, for ``register_bias``.
        norms, dropouts: {node: batch norm or dropout that changes the node's result}.
        norm_affines: {node in ``norms``: gain and offset per channel that follow its batch norm}. They are folded into
            the same layer as the batch norm.
        device_nodes: operators with a device among their arguments.
        state_names: {node of a buffer that the model writes: name of the buffer}.
        conditions: from ``find_branch_conditions``.
    """

    def __init__(self, program: ExportedProgram, observe: Callable[[ExportedProgram], ObservedProgram]) -> None:
        layers, signature = TrainingLayers.from_program(program), program.graph_signature
        names = [str(spec.target) for spec in signature.input_specs if spec.kind in TENSOR_KINDS]
        self._tensors = {name: store_of(program, name)[name] for name in names}
        self._out_spec = program.call_spec.out_spec
        self._output_count = sum(spec.kind is OutputKind.USER_OUTPUT for spec in signature.output_specs)
        with torch.no_grad(), ParameterTape(self._tensors) as self._tape:
            self.observed = observe(program)
        graph, module = self.observed.graph, self.observed.graph_module
        attribute_nodes = {str(node.target): node for node in graph.find_nodes(op="get_attr")}
        self._attributes: dict[str, Tensor] = {name: attrgetter(name)(module) for name in attribute_nodes}
        self.norms, self.dropouts = layers.locate(graph)
        self._affines = {node: node.meta[FOLDED_AFFINE] for node in self.norms if FOLDED_AFFINE in node.meta}
        self._tape.keep_only([*self._attributes.values(), *(x for a in self._affines.values() for x in a.tensors)])
        self.device_nodes = {
            node for node in graph.nodes if any(map(_is_device, pytree.tree_leaves((node.args, node.kwargs))))
        }
        self.conditions: BranchConditions = find_branch_conditions(graph)
        self.weighted_nodes = [
            node
            for node in graph.nodes
            if (record := find_record(node)) is not None and record.kind is AnnotationKind.CONV
        ]
        buffer_names = {
            attribute_nodes[name]: str(spec.target)
            for name, spec in self.observed._input_specs.items()
            if name in attribute_nodes
        }
        writes = graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default)
        self.state_names = {write.args[0]: buffer_names[write.args[0]] for write in writes}

    def update_constants(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Recompute the program's attributes from the model's ``tensors``, store them and return them by name."""
        current_value_of = self._tape.replay(lambda name: tensors.get(name, self._tensors[name]))
        constants = {name: current_value_of(tensor) for name, tensor in self._attributes.items()}
        for name, value in constants.items():
            self.observed.graph_module._buffers[name] = value.detach()
        self.norm_affines = {node: affine.map(current_value_of) for node, affine in self._affines.items()}
        return constants

    def run(self, inputs: Sequence[Any], settings: StepSettings) -> Any:
        """Run the model with fake quantization on the leaves of its inputs; write the new values of its buffers."""
        interpreter = FakeQuantInterpreter(self, settings)
        results = interpreter.run(inputs)
        with torch.no_grad():
            for name, value in interpreter.buffer_updates.items():
                settings.tensors[name].copy_(value)
        return pytree.tree_unflatten(results[-self._output_count :], self._out_spec)


class FakeQuantInterpreter(GraphInterpreter):
    """Runs a ``FakeQuantProgram`` once.

    Attributes:
        buffer_updates: new values of buffers, by name.
    """

    def __init__(self, program: FakeQuantProgram, settings: StepSettings) -> None:
        super().__init__(program.observed.graph, program.conditions)
        self._program, self._settings = program, settings
        self._observers = program.observed.observers
        self.buffer_updates: dict[str, Tensor] = {}
        self._constants = program.update_constants(settings.tensors)
        self._device = next(iter(self._constants.values())).device if self._constants else None
        self._ranges = dict(zip(activation_observers(program.observed), settings.ranges, strict=True))
        self._parameters: dict[Any, ScaleAndZeroPoint] = {
            observer: quantization_range() for observer, quantization_range in self._ranges.items()
        }
        self._quantized_operands: dict[tuple[Node, Any], Tensor] = {}
        for observer, parameters in self._parameters.items():
            set_qparams(observer, parameters)
        self._observe_weights()

    def _observe_weights(self) -> None:
        """Update the scales of weights from the current weights and biases."""
        weights = {
            observer: edge_or_node
            for edge_or_node, observer in self._observers.items()
            if isinstance(observer, WeightObserver)
        }
        for observer in weights:
            observer.bias_constraints.clear()
        for node in self._program.weighted_nodes:
            register_bias(self._program.observed.graph_module, node, self._observers)
        for observer, edge_or_node in weights.items():
            source = edge_or_node if isinstance(edge_or_node, Node) else edge_or_node[0]
            if source.op == "get_attr":
                self._update_parameters(observer, self._constants[str(source.target)])

    def get_attr(self, node: Node) -> Any:
        """Return the current value of an attribute, recomputed from the model's tensors."""
        return self._constants[str(node.target)]

    def call_function(self, node: Node, args: Any, kwargs: Any) -> Any:
        """Compute the result of an operator; writes of buffers are deferred to the end of the step."""
        if node.target is torch.ops.aten.copy_.default and node.args[0] in self._program.state_names:
            self.buffer_updates[self._program.state_names[node.args[0]]] = args[1].detach()
            return args[1]
        if node in self._program.device_nodes:
            args, kwargs = pytree.tree_map(self._to_device, (args, kwargs))
        return super().call_function(node, args, kwargs)

    def _to_device(self, x: Any) -> Any:
        """Replace a device argument by the device of the parameters."""
        return self._device if _is_device(x) and self._device is not None else x

    def on_result(self, node: Node, value: Any) -> Any:
        """Apply batch norm, fake quantization and dropout to a result."""
        program, settings = self._program, self._settings
        if settings.batch_statistics and node in program.norms:
            affine = program.norm_affines.get(node)
            value = program.norms[node].normalize_by_batch(value, settings.tensors, affine)
        observer = self._observers.get(node)
        if observer is not None:
            value = self._fake_quantize(observer, value)
        return program.dropouts[node](value) if settings.training and node in program.dropouts else value

    def on_operand(self, source: Node, reader: Node, value: Any) -> Any:
        """Fake-quantize an operand that has an observer other than the observer of the result of ``source``."""
        observer = self._observers.get((source, reader))
        if observer is None or observer is self._observers.get(source):
            return value
        key = source, observer
        if key not in self._quantized_operands:
            self._quantized_operands[key] = self._fake_quantize(observer, value)
        return self._quantized_operands[key]

    def _fake_quantize(self, observer: Any, value: Tensor) -> Tensor:
        if self._settings.training and observer in self._ranges:
            self._ranges[observer].update_moving_average(value)
        if observer not in self._parameters:
            self._update_parameters(observer, value)
        axis = observer.ch_axis if is_per_channel(observer.qscheme) else None
        return fake_quantize(value, self._parameters[observer], (observer.quant_min, observer.quant_max), axis)

    def _update_parameters(self, observer: Any, value: Tensor) -> None:
        """Compute scale and zero point: of a constant from ``value``; fixed and derived observers do not read it."""
        if isinstance(observer, RangeObserver):
            observer._statistics = type(observer._statistics)()
            # Observers of weights compute on the weight's device, the others on the CPU.
            observer(value.detach() if isinstance(observer, WeightObserver) else value.detach().cpu())
        self._parameters[observer] = observer.calculate_qparams()


def _is_device(x: Any) -> bool:
    return isinstance(x, torch.device)
