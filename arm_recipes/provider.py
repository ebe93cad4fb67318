"""Recipe provider: builds the ``ExportRecipe`` of each ``ArmRecipeType`` for ExecuTorch's registry.

Importing this module registers the provider with ExecuTorch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from executorch.export import BackendRecipeProvider, RecipeType, recipe_registry

from arm_recipes._internal.frozen_gc import frozen_gc
from arm_recipes._internal.messages import suppress_warnings
from arm_recipes.recipe import options, precisions
from arm_recipes.recipe.compile_specs import SPEC_BUILDERS, Options
from arm_recipes.recipe.recipe import ArmRecipe, build_recipe, make_recipe
from arm_recipes.recipe.saved_recipe import read_saved_recipe
from arm_recipes.recipe_types import BACKEND_NAME, ArmRecipeType

if TYPE_CHECKING:
    from arm_backend_core.targets.compile_spec import ArmCompileSpec
    from arm_recipes.pipeline.banked_memory_planning import BankedMemoryPlanner


class ArmRecipeProvider(BackendRecipeProvider):
    """ExecuTorch's provider interface for the recipes of ``ArmRecipeType``."""

    @property
    def backend_name(self) -> str:
        """Name in ExecuTorch's registry."""
        return BACKEND_NAME

    def get_supported_recipes(self) -> Sequence[RecipeType]:
        """Every ``ArmRecipeType``."""
        return list(ArmRecipeType)

    def create_recipe(self, recipe_type: RecipeType, **kwargs: Any) -> ArmRecipe | None:
        """Build a recipe. Returns None for recipe types of other providers.

        Raises:
            ValueError: an argument is unknown or invalid, arguments contradict each other, or the ``.ini`` file of
                Vela's configurations does not define the named system configuration or memory mode. All arguments are
                checked before the recipe is built.
        """
        if not isinstance(recipe_type, ArmRecipeType):
            return None
        # Copy mutable arguments: the recipe stores them, and the caller may change them later.
        kwargs = {
            name: copy(value) if isinstance(value, (dict, list, set)) else value for name, value in kwargs.items()
        }
        with frozen_gc():  # the first call imports the compiler, and imports start garbage collections
            values = options.resolve_options(recipe_type.name, kwargs)
            precisions.check_precisions(recipe_type.name, (values.get("precisions") or {}).values())
            spec = SPEC_BUILDERS[recipe_type.name](values)
            if values["dump_dir"] is not None:
                spec.dump_intermediate_artifacts_to(str(values["dump_dir"]))
            with suppress_warnings():
                return _assemble_recipe(recipe_type, spec, values, kwargs)


def _assemble_recipe(
    recipe_type: ArmRecipeType, spec: ArmCompileSpec, values: Options, user_options: Options
) -> ArmRecipe:
    """Assemble a recipe from its quantization, ATen transforms, edge passes, partitioner and memory planning.

    Args:
        recipe_type: the type.
        spec: the compile spec.
        values: validated options, with defaults.
        user_options: the options as the user passed them, which the recipe stores.
    """
    from executorch.exir.capture import ExecutorchBackendConfig

    from arm_backend_core import partitioner
    from arm_backend_core.aten.input_scales import quantize_inputs_as_uint8, quantize_inputs_once
    from arm_recipes.pipeline.banked_memory_planning import BankedMemoryPlanner
    from arm_recipes.stages.block_scaled import make_mx_recipe
    from arm_recipes.stages.edge import edge_manager_passes
    from arm_recipes.stages.edge.check_kernels import CheckRunnable
    from arm_recipes.stages.edge.dim_orders import legalize_dim_orders
    from arm_recipes.stages.edge.empty_tensors import replace_empty_tensors
    from arm_recipes.stages.edge.shared_weights import share_weights
    from arm_recipes.stages.lower import make_lowering_recipe

    target, precision = recipe_type.name.split("_")[0], recipe_type.name.rsplit("_", 1)[1]
    prefix = {"ETHOSU": "EthosU", "TOSA": "TOSA", "VGF": "Vgf", "CORTEX": "CortexM"}[target]
    quantization = make_mx_recipe(values["mx"]) if values.get("mx") else None
    passes: list[Any] = [
        edge_manager_passes.store_initial_state,
        edge_manager_passes.lower_integer_remainder,
        edge_manager_passes.lower_scaled_addition,
        edge_manager_passes.lower_shifts,
        edge_manager_passes.remove_redundant_copies,
    ]
    transforms: list[Any] = []
    if precision != "FP":
        quantizer = _create_quantizer(prefix, spec)
        quantization = _build_quantization(quantizer, recipe_type.name, values)
        if values["quantized_io"]:
            transforms.append(quantize_inputs_once)
            if values["input_dtype"] == "uint8":
                transforms.append(quantize_inputs_as_uint8)
            passes.append(edge_manager_passes.quantize_io)
        passes.append(edge_manager_passes.dequantize_after_gather)
        # The Direct Drive runtime on Linux uses ExecuTorch's quantize kernels, which ``partitioner`` has registered.
        if spec.uses_cortex_m_quantize and not values.get("direct_drive"):
            passes.append(edge_manager_passes.use_cortex_m_quantize)
    if spec.isa is not None:
        passes.append(partial(edge_manager_passes.use_cortex_m_kernels, spec.isa))
    passes += [replace_empty_tensors, legalize_dim_orders, share_weights, CheckRunnable(values["require_runnable"])]
    memory_planner = BankedMemoryPlanner.from_option(values["memory"]) if values.get("memory") else None
    passes += _memory_passes(target, values, getattr(spec, "optimise", ""), memory_planner)
    delegate_partitioner = getattr(partitioner, f"{prefix}Partitioner")(
        spec, require_full_delegation=values["require_full_delegation"], steps_per_call=values["steps_per_call"]
    )
    return build_recipe(
        recipe_type,
        user_options,
        quantization_recipe=quantization,
        aten_transform_passes=transforms or None,
        lowering_recipe=make_lowering_recipe(delegate_partitioner, passes),
        # Arm's runtime reads the payload from the program's flatbuffer, not from a separate segment.
        executorch_backend_config=ExecutorchBackendConfig(
            extract_delegate_segments=False, **_planning_options(target, values, memory_planner)
        ),
    )


def _planning_options(target: str, values: Options, memory_planner: BankedMemoryPlanner | None) -> dict[str, Any]:
    """Arguments of ``ExecutorchBackendConfig``: the symbolic shape pass, and the memory planning pass.

    The memory planning pass is omitted if ExecuTorch's default pass plans in the same way.
    """
    from executorch.exir.memory_planning import greedy

    from arm_recipes.pipeline.banked_memory_planning import planning_pass
    from arm_recipes.pipeline.shared_scratch import plan_shared_scratch
    from arm_recipes.stages.edge.dim_orders import RowMajorNonzeroShapePass

    plan_io = {name: values[name] for name in ("plan_inputs", "plan_outputs")}
    algorithm = memory_planner or (plan_shared_scratch if _shares_scratch(target, values) else greedy)
    if algorithm is greedy and all(plan_io.values()):
        return {"sym_shape_eval_pass": RowMajorNonzeroShapePass()}
    return {
        "memory_planning_pass": planning_pass(algorithm, **plan_io),
        "sym_shape_eval_pass": RowMajorNonzeroShapePass(),
    }


def _shares_scratch(target: str, values: Options) -> bool:
    """Whether the memory plan may place the NPU's scratch.

    True for an Ethos-U program for firmware (not for Direct Drive), with the option ``shared_scratch`` and without the
    option ``memory``.
    """
    return target == "ETHOSU" and not values.get("direct_drive") and values["shared_scratch"] and not values["memory"]


def _memory_passes(
    target: str, values: Options, optimise: str, memory_planner: BankedMemoryPlanner | None
) -> Iterator[Any]:
    """Yield the edge passes that place data in memories, check budgets, and refuse programs that the options exclude.

    Args:
        target: "ETHOSU", "TOSA", "VGF" or "CORTEX".
        values: validated options, with defaults.
        optimise: optimization goal of the compile spec.
        memory_planner: plans the memories of the option ``memory``; None without the option.
    """
    from arm_recipes.pipeline.banked_memory_planning import reject_mutated_inputs, reject_several_methods
    from arm_recipes.pipeline.budgets import CheckBudgets
    from arm_recipes.pipeline.shared_scratch import allow_shared_scratch
    from arm_recipes.stages.edge import edge_manager_passes
    from arm_recipes.stages.edge.external_blocks import ExternalizeBlocks

    if not values["plan_inputs"]:
        yield reject_mutated_inputs
    if not values["plan_outputs"]:
        yield edge_manager_passes.copy_aliased_outputs
    elif not values["plan_inputs"]:
        yield edge_manager_passes.copy_returned_inputs
    if _shares_scratch(target, values):
        yield allow_shared_scratch
    external = options.resolve_external(values.get("external"))
    if external:
        yield ExternalizeBlocks(external)
    if memory_planner is not None:
        yield reject_several_methods
    sram, flash = (values.get(name) and options.parse_bytes(values[name]) for name in ("sram_budget", "flash_budget"))
    if sram or flash or memory_planner is not None:
        yield CheckBudgets(sram, flash, optimise, values.get("board"), memory_planner)


def _create_quantizer(prefix: str, spec: ArmCompileSpec) -> Any:
    """Create the quantizer of a target; ``prefix`` is the start of its class name."""
    from arm_backend_core import quantization
    from arm_backend_core.cortex_m.quantizer import CortexMQuantizer

    return CortexMQuantizer(spec) if prefix == "CortexM" else getattr(quantization, f"{prefix}Quantizer")(spec)


def _build_quantization(quantizer: Any, name: str, values: Mapping[str, Any]) -> Any:
    """Configure the quantizer of an integer recipe, and return the recipe of its quantization stage."""
    from arm_recipes.recipe.observers import OBSERVERS
    from arm_recipes.stages.quantize import make_quantization_recipe

    default = precisions.default_precision(name, per_channel=values["per_channel"])
    precisions.configure_quantizer(quantizer, default, values["precisions"] or {}, OBSERVERS[values["observer"]])
    algorithms = options.resolve_algorithms(values["algorithms"], name)
    if values["quantized_io"]:  # the outputs then have the inputs' dtype, so they cannot become int16
        algorithms = tuple(algorithm for algorithm in algorithms if algorithm != "int16_outputs")
    return make_quantization_recipe(
        quantizer, values["calibration_samples"], algorithms, values["qat"], values["min_sqnr"]
    )


recipe_registry.register_backend_recipe_provider(ArmRecipeProvider())


def load_recipe(source: str | Path | Mapping[str, Any], **options: Any) -> ArmRecipe:
    """Load a recipe from a dict of ``ArmRecipe.to_dict`` or a file of ``ArmRecipe.save``.

    Args:
        source: path of the JSON file, or the dict.
        options: options to add or override, for example ``calibration_samples``.

    Raises:
        ValueError: ``source`` is not a saved recipe, or an option is invalid; the message names the problem.
    """
    name, saved = read_saved_recipe(source)
    return make_recipe(name, {**saved, **options})
