"""Compared tensors: the tensors of a captured program whose values a comparison measures."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor
from torch.export import ExportedProgram
from torch.fx import Node

from arm_backend_core.nodes import (
    boundary_source,
    is_dequantize,
    is_float,
    is_quantize,
    modules_of,
    operator_name,
    source_line,
)
from arm_backend_core.ops.catalog import find_record, has_shared_qparams, is_average
from arm_backend_core.program import constants_of
from arm_backend_core.quantization.diagnostics.error_metrics import TensorQParams
from arm_recipes._internal.conversions import dtype_name


@dataclass(frozen=True)
class ComparedTensor:
    """A tensor that is compared.

    Attributes:
        name: name of the step in the ``InterpreterPlan`` whose result is the tensor.
        float_step: name of the step whose result is the tensor before quantization.
        node: name of the node in the captured program that computes the tensor.
        qparams: quantization parameters; None if the tensor is not quantized.
        is_lossless: whether the operator adds no error: it only moves or selects values, with unchanged ``qparams``.
        has_fixed_qparams: whether the operator determines ``qparams``, regardless of calibration.
        dtype: dtype in the program.
        operator, module, source: ATen operator, path of the submodule, line of the model. A fused layer (an
            operator with weights and its activation) has both operators, and the module and line of the first.
        consumers: submodules that consume the tensor; empty if it has no consumer, or the root module consumes it.
        weights: names of the quantized constants that the tensor's layer reads. The layer consists of the operators
            after the preceding quantized tensors, up to this tensor.
    """

    name: str
    float_step: str
    node: str
    qparams: TensorQParams | None
    is_lossless: bool
    has_fixed_qparams: bool
    dtype: str
    operator: str
    module: str
    consumers: tuple[str, ...]
    source: str
    weights: tuple[str, ...] = ()


def find_compared_tensors(program: ExportedProgram, float_constants: Mapping[str, Tensor]) -> list[ComparedTensor]:
    """List the quantized tensors, and the floating-point tensors that are no intermediate results of quantized layers.

    Excludes tensors that do not depend on the inputs.
    """
    tensors = []
    fused: set[Node] = set()
    for node in reversed(program.graph.nodes):
        computes = node.op == "call_function" and not is_quantize(node) and not is_dequantize(node)
        if computes and node.users and all(is_quantize(user) or user in fused for user in node.users):
            fused.add(node)
    input_dependent = set(program.graph.find_nodes(op="placeholder")) - constants_of(program).keys()
    for node in program.graph.nodes:
        if not input_dependent.isdisjoint(node.all_input_nodes):
            input_dependent.add(node)
        if node.op != "call_function" or is_dequantize(node) or node in fused or node not in input_dependent:
            continue
        if is_quantize(node):
            tensors.append(_create_compared_tensor(node, node.args[0], _read_qparams(node), float_constants))
        elif is_float(node) and isinstance(node.meta["val"], Tensor):
            tensors.append(_create_compared_tensor(node, node, None, float_constants))
    return tensors


def _create_compared_tensor(
    node: Node, value: Node, qparams: TensorQParams | None, float_constants: Mapping[str, Tensor]
) -> ComparedTensor:
    source = boundary_source(value)
    producer = source.args[0] if source.target is operator.getitem else source
    assert isinstance(producer, Node)
    weights = _quantized_weights(value, float_constants)
    # A fused layer is described by its operator with weights, not by its activation.
    main_operator = next(iter(weights.values()), producer)
    *_, module = ("", *modules_of(main_operator))
    operators = [operator_name(node) for node in dict.fromkeys((main_operator, producer))]
    return ComparedTensor(
        name=node.name,
        float_step=value.name,
        node=source.name,
        qparams=qparams,
        is_lossless=_is_lossless(producer, qparams),
        has_fixed_qparams=getattr(find_record(producer), "fixed_range", None) is not None,
        dtype=dtype_name(node.meta["val"].dtype),
        operator="input" if producer.op == "placeholder" else " + ".join(operators),
        module=module,
        consumers=_consumer_modules(node),
        source=source_line(main_operator),
        weights=tuple(weights),
    )


def _consumer_modules(node: Node) -> tuple[str, ...]:
    """Return the submodules that compute with a tensor, directly or after data movement."""
    modules: dict[str, None] = {}
    pending = list(node.users)
    while pending:
        user = pending.pop(0)
        if is_quantize(user) or is_dequantize(user) or has_shared_qparams(user):
            pending += user.users
        elif user.op == "call_function":
            modules[("", *modules_of(user))[-1]] = None
    return () if "" in modules else tuple(modules)


def _is_lossless(node: Node, qparams: TensorQParams | None) -> bool:
    """Whether a node only moves or selects values and, if its result is quantized, keeps the qparams of its inputs."""
    sources = [source for source in node.all_input_nodes if is_float(source)]
    has_same_qparams = qparams is None or all(
        is_dequantize(source) and _read_qparams(source) == qparams for source in sources
    )
    return has_shared_qparams(node) and not is_average(node) and bool(sources) and has_same_qparams


def _quantized_weights(node: Node, float_constants: Mapping[str, Tensor]) -> dict[str, Node]:
    """Find the quantized constants that contribute to a tensor: {name of the constant: operator that reads it}.

    The search goes back from the tensor to the preceding quantized tensors.
    """
    readers: dict[str, Node] = {}
    seen, pending = {node}, [node] if float_constants else []
    while pending:
        reader = pending.pop()
        for source in reader.all_input_nodes:
            if is_dequantize(source):
                value = source.args[0]
                if isinstance(value, Node) and value.name in float_constants:
                    readers[value.name] = reader
            elif source.op == "call_function" and not is_quantize(source) and source not in seen:
                seen.add(source)
                pending.append(source)
    return readers


def _read_qparams(node: Node) -> TensorQParams | None:
    """Read the parameters of a quantize or dequantize node; None if they are per channel or computed."""
    args = node.args[1:5]
    if "per_tensor" not in str(node.target) or any(isinstance(x, Node) for x in args):
        return None
    scale, zero_point, quant_min, quant_max = args
    return TensorQParams(float(scale), int(zero_point), int(quant_min), int(quant_max))  # type: ignore[arg-type]
