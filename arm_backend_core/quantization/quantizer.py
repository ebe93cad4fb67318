"""PT2E quantizers (TOSA, Ethos-U, VGF) with the configuration methods of ExecuTorch's quantizers."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from operator import attrgetter
from typing import Any, Self

import torch
from torch.fx import Graph, GraphModule, Node
from torchao.quantization.pt2e.quantizer import QuantizationAnnotation, Quantizer

from arm_backend_core.aten.angle_range_reduction import reduce_angle_range
from arm_backend_core.aten.batch_norm import fold_batch_norms
from arm_backend_core.aten.constant_folding import fold_constant_weights
from arm_backend_core.aten.decompose import decompose
from arm_backend_core.aten.functionalize import functionalize
from arm_backend_core.aten.high_rank import reduce_ranks
from arm_backend_core.aten.higher_order import inline_higher_order_ops
from arm_backend_core.aten.int_to_float import promote_integers
from arm_backend_core.aten.l2_normalization import convert_l2_normalize_to_rms_norm
from arm_backend_core.aten.local_response_norm import rewrite_local_response_norms
from arm_backend_core.aten.mask_constants import bound_masks, rewrite_extreme_comparisons
from arm_backend_core.aten.masked_rows import zero_masked_rows
from arm_backend_core.aten.matmul_to_linear import convert_matmuls_to_linear
from arm_backend_core.aten.scatter_add import rewrite_scatter_adds
from arm_backend_core.aten.scatter_chains import resolve_scatter_chains
from arm_backend_core.errors import ModelError
from arm_backend_core.graph_edits import eliminate_dead_code
from arm_backend_core.nodes import constant_nodes, describe_node, is_float, modules_of
from arm_backend_core.ops.catalog import find_record
from arm_backend_core.ops.registry import AnnotationKind
from arm_backend_core.quantization.algorithms.channel_affine import fold_channel_affines
from arm_backend_core.quantization.algorithms.coordinate_precision import find_coordinate_nodes
from arm_backend_core.quantization.algorithms.group_norms import layer_norms_to_group_norms
from arm_backend_core.quantization.annotator import ANNOTATION, Annotator
from arm_backend_core.quantization.config import QuantizationConfig, get_symmetric_a16w8_quantization_config
from arm_backend_core.quantization.graph_observers import set_observer_properties, share_timestep_observers
from arm_backend_core.quantization.hardware_dependencies import TrackedHardware
from arm_backend_core.similar_names import suggest_name
from arm_backend_core.targets.compile_spec import (
    ArmCompileSpec,
    EthosUCompileSpec,
    TosaCompileSpec,
    VgfCompileSpec,
)

Config = QuantizationConfig | None
_A16W8_CONFIG = get_symmetric_a16w8_quantization_config()


class ArmQuantizer(Quantizer):
    """Annotates the operators that the target runs as integers.

    The most specific setting wins: module name, then module type, then global. The configuration None leaves operators
    in floating point.

    ``algorithms`` and ``min_sqnr`` are options of the export. They are stored here, because ``ExportRecipe.combine``
    keeps only the quantizers of a recipe.

    Attributes:
        algorithms: names of the quantization algorithms that the export applies; None for the default algorithms.
        min_sqnr: minimum SQNR of each output in dB; None for no minimum.

    Raises:
        TypeError: ``compile_spec`` is for another target.
        ValueError: the target has no integer profile.
    """

    spec_class: type[ArmCompileSpec]

    def __init__(self, compile_spec: ArmCompileSpec) -> None:
        super().__init__()
        if not isinstance(compile_spec, self.spec_class):
            raise TypeError(
                f"compile_spec: {type(self).__name__} takes a {self.spec_class.__name__}, "
                f"got {type(compile_spec).__name__}"
            )
        if not compile_spec.target.has_int_profile:
            raise ValueError(f"compile_spec: {compile_spec.target.name} has no INT profile to quantize for; add '+INT'")
        self.compile_spec = compile_spec
        self.algorithms: Collection[str] | None = None
        self.min_sqnr: float | None = None
        self._global: Config = None
        self._io: Config = None
        self._names: dict[str, Config] = {}
        self._options: dict[str, str] = {}  # module name -> argument that an error message names
        self._types: dict[type[torch.nn.Module], Config] = {}

    def set_global(self, quantization_config: Config) -> Self:
        """Set the configuration of every operator without a more specific setting."""
        self._global = quantization_config
        return self

    def set_io(self, quantization_config: Config) -> Self:
        """Set the configuration of the model's inputs and outputs."""
        self._io = quantization_config
        return self

    def set_module_name(
        self, module_name: str, quantization_config: Config, *, option: str = "set_module_name"
    ) -> Self:
        """Set the configuration of a submodule, named as in ``named_modules()``, and of its submodules.

        Args:
            module_name: name of the submodule.
            quantization_config: its configuration.
            option: the argument that an error names if the model has no such submodule.
        """
        self._names[module_name] = quantization_config
        self._options[module_name] = option
        return self

    def set_module_type(self, module_type: type[torch.nn.Module], quantization_config: Config) -> Self:
        """Set the configuration of every submodule of this type and of its submodules."""
        self._types[module_type] = quantization_config
        return self

    def transform_for_annotation(self, model: GraphModule) -> GraphModule:
        """Make the graph functional, decompose composite operators and apply the rewrites that precede quantization.

        Called by ``prepare_pt2e`` and ``ObservedProgram``.

        Raises:
            ModelError: the graph writes in place to memory that several tensors share, which quantization cannot
                preserve: quantized tensors share no memory. Or an operator cannot be decomposed (see ``decompose``).
        """
        inline_higher_order_ops(model, {})
        aliased_write = functionalize(model.graph, write_back=True)
        if aliased_write is not None:
            advice = "quantize torch.export.export(model, inputs).run_decompositions({}).module()"
            raise ModelError(
                f"{describe_node(aliased_write)} writes in place to memory that other tensors share: {advice}"
            )
        _set_attribute_values(model)
        fold_constant_weights(model)
        fold_batch_norms(model)
        convert_l2_normalize_to_rms_norm(model)
        rewrite_local_response_norms(model)
        layer_norms_to_group_norms(model)
        hardware = TrackedHardware.of(self.compile_spec.target.hardware)
        rewrite_scatter_adds(model, hardware, quantized=True)
        resolve_scatter_chains(model)
        decompose(model, quantized=True)
        reduce_ranks(model)
        fold_constant_weights(model)
        reduce_angle_range(model)
        rewrite_extreme_comparisons(model)
        promote_integers(model)
        zero_masked_rows(model)
        convert_matmuls_to_linear(model, hardware, self._has_int16_activations)
        fold_channel_affines(model, hardware, lambda node: self._config(modules_of(node)))
        bound_masks(model)
        eliminate_dead_code(model.graph)  # operators that the passes above replaced
        _set_attribute_values(model)
        return model  # no recompile: prepare_pt2e builds a new module from the graph

    def annotate(self, model: GraphModule) -> GraphModule:
        """Write annotations; called by ``prepare_pt2e`` and ``ObservedProgram``.

        Raises:
            ValueError: a module name or type matches nothing in the model.
            ModelError: an operator to quantize computes in another dtype than float32.
        """
        stacks = {node: modules_of(node) for node in model.graph.nodes}
        self._check_module_settings(stacks)
        constants = constant_nodes(model.graph)
        for node in model.graph.nodes:
            if self._config(stacks[node]) is not None and node not in constants:
                _check_dtype(node)
        self._annotate_io(model)
        Annotator(model.graph, self._configs_of(model.graph, stacks)).run()
        return model

    def _configs_of(self, graph: Graph, stacks: Mapping[Node, dict[str, Any]]) -> Callable[[Node], Config]:
        """Return the function that maps each node to its configuration.

        Args:
            graph: the graph to annotate.
            stacks: {node: the modules that contain it}, in the format of ``modules_of``.
        """
        uses_int16 = "int16" in self.compile_spec.target.extensions and self._uses("int16_coordinates")
        coordinates = find_coordinate_nodes(graph) if uses_int16 else set()

        def config_of(node: Node) -> Config:
            config = self._config(stacks[node])
            return _A16W8_CONFIG if config is not None and node in coordinates else config

        return config_of

    def _uses(self, algorithm: str) -> bool:
        return self.algorithms is None or algorithm in self.algorithms

    def validate(self, model: GraphModule) -> None:
        """Do nothing. torchao requires this method, but ``annotate`` has already checked the model."""

    def prepare_obs_or_fq_callback(self, model: GraphModule, edge_or_node_to_obs_or_fq: dict[Any, Any]) -> None:
        """Share observers across time steps, and set the observers' properties (``set_observer_properties``).

        Called by ``prepare_pt2e`` and ``ObservedProgram``.
        """
        share_timestep_observers(edge_or_node_to_obs_or_fq)
        set_observer_properties((model, edge_or_node_to_obs_or_fq))

    def _config(self, modules: dict[str, Any]) -> Config:
        for name in sorted(self._names, key=len, reverse=True):
            if any(_is_inside(path, name) for path in modules):
                return self._names[name]
        for module_type, config in self._types.items():
            if any(_is_type(entry, module_type) for entry in modules.values()):
                return config
        return self._global

    def _has_int16_activations(self, node: Node) -> bool:
        config = self._config(modules_of(node))
        return config is not None and config.activation.dtype is torch.int16

    def _check_module_settings(self, stacks: dict[Node, dict[str, Any]]) -> None:
        for name in self._names:
            if not any(_is_inside(path, name) for modules in stacks.values() for path in modules):
                paths = sorted({path for modules in stacks.values() for path in modules if path})
                problem = f"{self._options[name]}: the model has no module '{name}' with operators of its own"
                raise ValueError(f"{problem}{suggest_name(name, paths) or '.'} It has: {', '.join(paths)}")
        for module_type in self._types:
            entries = [entry for modules in stacks.values() for entry in modules.values()]
            if not any(_is_type(entry, module_type) for entry in entries):
                types = sorted({_type_name(entry).rsplit(".", 1)[-1] for entry in entries})
                problem = f"set_module_type: the model has no {module_type.__name__}"
                raise ValueError(f"{problem}. It has: {', '.join(types)}")

    def _annotate_io(self, model: GraphModule) -> None:
        if self._io is None:
            return
        for node in model.graph.nodes:
            if node.op == "placeholder" and is_float(node):
                node.meta[ANNOTATION] = QuantizationAnnotation({}, self._io.activation, _annotated=True)
            elif node.op == "output":
                inputs = {source: self._io.activation for source in node.all_input_nodes if is_float(source)}
                node.meta[ANNOTATION] = QuantizationAnnotation(dict(inputs), _annotated=True)


class TOSAQuantizer(ArmQuantizer):
    """Quantizes for a ``TosaCompileSpec``."""

    spec_class = TosaCompileSpec


class EthosUQuantizer(ArmQuantizer):
    """Quantizes for an ``EthosUCompileSpec``."""

    spec_class = EthosUCompileSpec


class VgfQuantizer(ArmQuantizer):
    """Quantizes for a ``VgfCompileSpec``."""

    spec_class = VgfCompileSpec


_CONVERSION_ADVICE = "remove the conversion to {} (.to, torch.autocast) from the model"


def _check_dtype(node: Node) -> None:
    record = find_record(node)
    if record is None or record.kind is AnnotationKind.PASSTHROUGH or not is_float(node):
        return
    values = node.meta["val"]
    dtype = (values[0] if isinstance(values, (list, tuple)) else values).dtype
    if dtype is not torch.float32:
        converts = record.is_cast and node.all_input_nodes[0].meta["val"].dtype is torch.float32
        raise ModelError(
            f"{describe_node(node)} is {dtype}, and integer programs are quantized from torch.float32: "
            f"{_CONVERSION_ADVICE.format(dtype) if converts else _advise_float32(node.graph, dtype)}"
        )


def _advise_float32(graph: Graph, dtype: torch.dtype) -> str:
    """Advise the user to convert the model or inputs of this dtype; if there are none, to remove the conversion."""

    def has_dtype(node: Node) -> bool:
        return getattr(node.meta.get("val"), "dtype", None) is dtype

    names = [f"'{node.target}'" for node in graph.find_nodes(op="placeholder") if has_dtype(node)]
    parts = ["the model"] * any(map(has_dtype, graph.find_nodes(op="get_attr")))
    parts += [f"the input{'s' * (len(names) > 1)} {', '.join(names)}"] * bool(names)
    if not parts:
        return _CONVERSION_ADVICE.format(dtype)
    return f"convert {' and '.join(parts)} with .float()"


def _set_attribute_values(model: GraphModule) -> None:
    """Set missing ``meta["val"]`` of get_attr nodes to the attribute's tensor; constant folding creates such nodes."""
    for node in model.graph.nodes:
        if node.op == "get_attr" and "val" not in node.meta:
            node.meta["val"] = attrgetter(str(node.target))(model)


def _is_inside(path: str, name: str) -> bool:
    return path == name or path.startswith(name + ".")


def _type_name(entry: Any) -> str:
    return f"{entry.__module__}.{entry.__qualname__}" if isinstance(entry, type) else str(entry)


def _is_type(entry: Any, module_type: type[torch.nn.Module]) -> bool:
    return entry is module_type or _type_name(entry) == f"{module_type.__module__}.{module_type.__qualname__}"
