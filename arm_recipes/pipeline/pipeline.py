"""The export pipeline: runs the stages of a recipe.

The stages are ExecuTorch's, but faster stages of this package replace capture, quantization and lowering.
"""

from __future__ import annotations

import copy
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import dropwhile, takewhile
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
from executorch.exir import EdgeProgramManager, ExecutorchProgramManager
from executorch.export import ExportRecipe, LoweringRecipe, QuantizationRecipe, StageType
from executorch.export.stages import (
    EdgeProgramManagerTransformStage,
    ExecutorchStage,
    PipelineArtifact,
    SourceTransformStage,
    Stage,
    ToBackendStage,
    ToEdgeStage,
)
from torch.export import ExportedProgram
from torch.fx import Graph

from arm_backend_core.program import user_inputs
from arm_recipes._internal.executorch_programs import (
    collect_program_chunks,
    data_files,
    normalize_call_signature,
    restore_debug_handles,
    store_named_data,
)
from arm_recipes._internal.messages import LOGGER, warn
from arm_recipes.pipeline.artifact import Artifact, ExportObjects
from arm_recipes.pipeline.float_reference import create_float_reference
from arm_recipes.pipeline.method_results import MethodResults
from arm_recipes.pipeline.program_io import check_outputs, make_tensor_infos
from arm_recipes.pipeline.progress import Progress
from arm_recipes.pipeline.shared_buffers import check_shared_buffers, plan_shared_buffers, unify_buffer_names
from arm_recipes.pipeline.stage_runner import run_stage
from arm_recipes.pipeline.unlowered_programs import UnloweredPrograms, first_samples
from arm_recipes.report import context, ram
from arm_recipes.report.report import Report
from arm_recipes.runtime.signature import METADATA_KEY, encode_metadata
from arm_recipes.samples.call_inputs import InputSignature
from arm_recipes.samples.export_arguments import Examples, Model
from arm_recipes.samples.shape_variants import ShapeVariants
from arm_recipes.stages.capture.capture import Capture, FastTorchExportStage
from arm_recipes.stages.lower import FastLowerStage
from arm_recipes.stages.quantize import FastQuantizeStage

if TYPE_CHECKING:
    from arm_backend_core.compilation_log import RefusedOperator

#: First stage after capture and quantization. Only stages from here on read the options of lowering.
_FIRST_LOWERING_STAGE = StageType.TO_EDGE_TRANSFORM_AND_LOWER


class Pipeline:
    """One run of a recipe."""

    def __init__(
        self,
        recipe: ExportRecipe,
        models: Mapping[str, Model],
        examples: Examples,
        *,
        dynamic_shapes: Any,
        constant_methods: dict[str, Any] | None,
        strict: bool | None,
        progress: bool,
        shape_variants: Mapping[str, ShapeVariants] = MappingProxyType({}),
    ) -> None:
        self._recipe, self._models, self._shape_variants = recipe, models, shape_variants
        self._model_names, self._argument_notes = context.describe_models(models), list[str]()
        self._progress = Progress(progress)
        # ``strict`` of an ExportRecipe is True by default, so True counts as not set.
        self._capture = Capture(strict if strict is not None or recipe.strict else False)
        if dynamic_shapes is not None and not set(dynamic_shapes) <= set(models):
            dynamic_shapes = {"forward": dynamic_shapes}
        self._stage_output = PipelineArtifact(  # output of the last stage; before the first stage, the models
            dict(models),
            {
                "example_inputs": examples,
                "dynamic_shapes": dynamic_shapes or {},
                "constant_methods": constant_methods,
                "export_recipe": recipe,
            },
        )
        self._shares_buffers = False
        self._seconds: dict[str, float] = {}
        self._notes: list[str] = []
        self._methods: defaultdict[str, MethodResults] = defaultdict(MethodResults)
        self._unlowered: UnloweredPrograms | None = None

    @classmethod
    def resume(cls, unlowered: UnloweredPrograms, recipe: ExportRecipe, *, progress: bool) -> Pipeline:
        """Create a pipeline that lowers programs that another pipeline captured and quantized.

        The notes of that pipeline are added to the current log (``arm_backend_core.compilation_log``).

        Args:
            unlowered: the programs.
            recipe: a recipe that quantizes them in the same way.
            progress: show a progress bar.
        """
        from arm_backend_core import compilation_log

        pipeline = cls(
            recipe,
            {},
            unlowered.examples,
            dynamic_shapes=None,
            constant_methods=unlowered.constant_methods,
            strict=None,
            progress=progress,
            shape_variants=unlowered.shape_variants,
        )
        pipeline._unlowered, pipeline._model_names = unlowered, unlowered.model_names
        pipeline._argument_notes += unlowered.argument_notes
        pipeline._progress.sample_counts.update(unlowered.sample_counts)
        pipeline._capture.notes += unlowered.capture_notes
        pipeline._notes += unlowered.stage_notes
        compilation_log.current_log().notes += unlowered.logged_notes
        for name, method in unlowered.methods.items():
            pipeline._methods[name] = copy.copy(method)
        return pipeline

    @property
    def _programs(self) -> dict[str, ExportedProgram]:
        """The captured programs by method."""
        return {name: method.program for name, method in self._methods.items() if method.program is not None}

    def run(self, notes: Sequence[str] = ()) -> None:
        """Run all stages; a resumed pipeline runs lowering and later stages. ``notes`` are added to the report.

        Raises:
            ValueError: ``pipeline_stages`` do not end in TO_EXECUTORCH, or would replace layers of a captured model.
            ExportError, ArmBackendError: a stage failed.
        """
        stages = list(self._recipe.pipeline_stages or self._default_stages())
        if stages[-1] is not StageType.TO_EXECUTORCH:
            raise ValueError(f"recipe.pipeline_stages must end in TO_EXECUTORCH, not {stages[-1].name}")
        self._argument_notes += notes
        if self._unlowered is not None:
            self._copy_unlowered_programs()
            self._run_stages(list(dropwhile(lambda kind: kind is not _FIRST_LOWERING_STAGE, stages)))
            return
        for method, model in self._models.items():
            if isinstance(model, ExportedProgram):
                self._capture.warn_about_training_behavior(method, model, captured_by_user=True)
        self._run_stages(stages)

    def capture_programs(self) -> dict[str, ExportedProgram]:
        """Capture the models. The stages reuse these programs.

        Raises:
            ExportError: a model cannot be captured.
        """
        examples, shapes = map(self._stage_output.get_context, ("example_inputs", "dynamic_shapes"))
        programs = {}
        for method, model in self._models.items():
            if not isinstance(model, ExportedProgram):
                model = self._capture.capture_early(method, model, examples[method][0], shapes.get(method))
            programs[method] = model
        return programs

    def quantize_programs(self) -> tuple[UnloweredPrograms, dict[str, ExportedProgram]]:
        """Run the stages before lowering.

        Returns:
            The captured and quantized programs, and copies of them that lowering may edit, by method.
        """
        self._run_stages(list(takewhile(lambda kind: kind is not _FIRST_LOWERING_STAGE, self._default_stages())))
        assert self._unlowered is not None
        return self._unlowered, self._stage_output.data

    def _run_stages(self, stages: list[StageType]) -> None:
        for kind in self._progress.track_stages(stages):
            if kind is StageType.TO_EXECUTORCH:
                self._record_lowered_programs(self._stage_output.data)  # before emission, which edits them in place
            stage = self._create_stage(kind)
            start = time.perf_counter()
            run_stage(kind, stage, self._stage_output, self._models or self._methods, self._list_error_sources)
            self._seconds[kind.value] = seconds = time.perf_counter() - start
            LOGGER.info("%s: %.2f s", kind.value, seconds)
            self._stage_output = stage.get_artifacts()
            if kind is StageType.TO_EXECUTORCH:
                self._check_dim_orders(self._stage_output.data)
            if kind is StageType.SOURCE_TRANSFORM:
                self._note_layers_without_block_scales()
            if isinstance(stage, FastQuantizeStage):
                for name, float_program in stage.float_programs.items():
                    self._methods[name].float_program = float_program
                for name, sqnr in stage.output_sqnr.items():
                    self._methods[name].sqnr = sqnr
                for note in stage.notes:
                    self._add_note(note)
            if kind is StageType.TORCH_EXPORT:
                self._describe_captured_programs()
                self._unlowered = self._collect_unlowered_programs()
                self._copy_unlowered_programs()

    def _check_dim_orders(self, manager: ExecutorchProgramManager) -> None:
        from arm_recipes.stages.edge.dim_orders import check_dim_orders, legalize_dim_orders

        lowering = self._recipe.lowering_recipe
        if lowering is not None and legalize_dim_orders in (lowering.edge_manager_transform_passes or []):
            check_dim_orders(manager, self._methods)

    def _list_error_sources(self) -> tuple[list[torch.nn.Module], list[Graph]]:
        """Modules and graphs to locate errors in: the user's modules, and the captured or lowered graphs."""
        models = [model for model in self._models.values() if isinstance(model, torch.nn.Module)]
        lowered = [method.graph for method in self._methods.values() if method.graph is not None]
        return models, [x.graph for x in lowered or [program.graph_module for program in self._programs.values()]]

    def create_artifact(self, refused: list[RefusedOperator], logged_notes: list[str]) -> Artifact:
        """Build the artifact with its report, from the refused operators and the notes of the compilation log."""
        manager, samples = self._stage_output.data, self._progress.sample_counts
        export_context = context.make_export_context(self._model_names, self._recipe)
        methods = [
            method.create_report(name, method.graph, refused, samples.get(name), export_context.processor)
            for name, method in self._methods.items()
            if method.graph is not None
        ]
        report = Report(
            recipe=self._recipe.name or "unnamed",
            methods=tuple(methods),
            program_bytes=sum(map(len, collect_program_chunks(manager))),
            data_file_bytes=sum(map(len, data_files(manager).values())),
            seconds=self._seconds,
            notes=(*self._argument_notes, *logged_notes, *self._capture.notes, *self._notes),
            context=export_context,
            ram=ram.compute_ram(
                {m.name: m.delegates for m in methods},
                manager.executorch_program.execution_plan,
                self._recipe,
                on_cortex_m=export_context.processor is not None,
            ),
        )
        float_programs = {name: x.float_program for name, x in self._methods.items() if x.float_program is not None}
        reference = create_float_reference(self._programs, float_programs, self._recipe)
        export_objects = ExportObjects(self._programs, manager, reference, self._unlowered)
        signatures = {name: x.input_signature for name, x in self._methods.items() if x.input_signature is not None}
        out_specs = {name: self._methods[name].out_spec for name in signatures}
        return Artifact(report, signatures, out_specs, self._shape_variants, self._recipe, lambda: export_objects)

    def _default_stages(self) -> Iterable[StageType]:
        quantization, lowering = self._recipe.quantization_recipe, self._recipe.lowering_recipe
        if quantization is not None and quantization.ao_quantization_configs:
            captured = [name for name, model in self._models.items() if isinstance(model, ExportedProgram)]
            if captured:
                raise ValueError(
                    f"model: '{captured[0]}' is already captured, but the recipe replaces layers; pass the nn.Module"
                )
            yield StageType.SOURCE_TRANSFORM
        if quantization is not None and quantization.quantizers:
            yield StageType.QUANTIZE
        yield StageType.TORCH_EXPORT
        yield StageType.TO_EDGE_TRANSFORM_AND_LOWER
        if lowering is not None and lowering.edge_manager_transform_passes:
            yield StageType.EDGE_PROGRAM_MANAGER_TRANSFORM
        yield StageType.TO_EXECUTORCH

    def _create_stage(self, kind: StageType) -> Stage:
        recipe = self._recipe
        lowering = recipe.lowering_recipe or LoweringRecipe()
        build: dict[StageType, Callable[[], Stage]] = {
            StageType.SOURCE_TRANSFORM: lambda: SourceTransformStage(
                recipe.quantization_recipe, in_place=recipe.source_transform_in_place
            ),
            StageType.QUANTIZE: self._create_quantize_stage,
            StageType.TORCH_EXPORT: lambda: FastTorchExportStage(recipe.aten_transform_passes, self._capture),
            StageType.TO_EDGE_TRANSFORM_AND_LOWER: lambda: FastLowerStage.from_recipe(lowering),
            StageType.TO_EDGE: lambda: ToEdgeStage.from_recipe(lowering),
            StageType.EDGE_PROGRAM_MANAGER_TRANSFORM: lambda: EdgeProgramManagerTransformStage.from_recipe(lowering),
            StageType.TO_BACKEND: lambda: ToBackendStage.from_recipe(lowering),
            StageType.TO_EXECUTORCH: lambda: ExecutorchStage(self._backend_config()),
        }
        return build[kind]()

    def _create_quantize_stage(self) -> Stage:
        from arm_recipes.stages.train import TrainingQuantizeStage  # imports the compiler

        quantization = self._recipe.quantization_recipe or QuantizationRecipe()
        return TrainingQuantizeStage(quantization, self._capture, self._progress.track_calibration)

    def _backend_config(self) -> Any:
        config = self._recipe.executorch_backend_config
        if not self._shares_buffers:
            return config
        from executorch.exir.capture import ExecutorchBackendConfig

        return plan_shared_buffers(config or ExecutorchBackendConfig())

    def _describe_captured_programs(self) -> None:
        for name, program in self._stage_output.data.items():
            check_outputs(name, program)
            method = self._methods[name]
            method.program, method.out_spec = program, program.call_spec.out_spec
            method.input_signature = input_signature = InputSignature.from_program(program)
            for constant, value in input_signature.constants.items():
                self._notes.append(f"input '{constant}' of '{name}' is the constant {value!r} in the program")
        self._warn_about_64_bit_tensors()

    def _collect_unlowered_programs(self) -> UnloweredPrograms:
        from arm_backend_core import compilation_log

        log = compilation_log.current_log()
        return UnloweredPrograms(
            methods={name: copy.copy(method) for name, method in self._methods.items()},
            model_names=self._model_names,
            examples=first_samples(self._stage_output.get_context("example_inputs")),
            sample_counts=dict(self._progress.sample_counts),
            shape_variants=self._shape_variants,
            constant_methods=self._stage_output.get_context("constant_methods"),
            argument_notes=tuple(self._argument_notes),
            logged_notes=tuple(log.notes),
            capture_notes=tuple(self._capture.notes),
            stage_notes=tuple(self._notes),
            hardware_dependencies=dict(log.hardware_dependencies),
        )

    def _copy_unlowered_programs(self) -> None:
        """Copy the programs for lowering. Lowering edits programs in place, and a program may be the user's.

        The copies get debug handles, and lose inputs that are numbers, strings or None. A buffer that methods share
        gets one name in all methods. If any is shared, linear layers are tiled by rows, so that methods share weights.
        """
        from arm_backend_core.nodes import assign_debug_handles
        from arm_backend_core.program import copy_program
        from arm_recipes.stages.edge.row_tiling import tile_rows_for_weight_sharing

        copies = {name: copy_program(program) for name, program in self._programs.items()}
        for program in copies.values():
            normalize_call_signature(program)
            assign_debug_handles(program.graph, 1)
        self._shares_buffers = unify_buffer_names(copies)
        if self._shares_buffers:
            tile_rows_for_weight_sharing(copies, self._recipe)
        self._stage_output = self._stage_output.copy_with_new_data(copies)

    def _note_layers_without_block_scales(self) -> None:
        from arm_recipes.stages import block_scaled  # imports torchao

        if not block_scaled.is_mx_recipe(self._recipe.quantization_recipe):
            return
        for name, model in self._stage_output.data.items():
            notes, is_ineffective = block_scaled.describe_layers_without_block_scales(model, name)
            self._notes += notes
            if is_ineffective:
                self._add_note(f"the option mx has no effect: no layer of '{name}' is block-scaled")

    def _warn_about_64_bit_tensors(self) -> None:
        if getattr(self._recipe, "type_name", "").startswith("CORTEX_M"):
            return  # ExecuTorch's operators compute with 64-bit numbers
        for name, method in self._methods.items():
            for note in method.describe_64_bit_tensors(name, self._stage_output.get_context("example_inputs")):
                self._add_note(note)

    def _add_note(self, text: str) -> None:
        self._notes.append(text)
        warn(text)

    def _record_lowered_programs(self, manager: EdgeProgramManager) -> None:
        from arm_backend_core.program import copy_module
        from arm_recipes.stages.edge.edge_manager_passes import program_outputs

        if self._shares_buffers:
            check_shared_buffers({name: manager.exported_program(name) for name in manager.methods})
        config_methods, mutated_inputs = manager._config_methods or {}, {}
        for name in self._programs or sorted(manager.methods):
            program = manager.exported_program(name)
            restore_debug_handles(program)
            method = self._methods[name]
            method.graph = copy_module(program.graph_module)
            if method.input_signature is None:  # the recipe does not capture
                method.input_signature = InputSignature.from_program(program)
                method.out_spec = program.call_spec.out_spec
            inputs = [(node.name, node) for node in user_inputs(program)]
            method.inputs = make_tensor_infos(inputs, config_methods, f"{name}_input")
            method.outputs = make_tensor_infos(program_outputs(program), config_methods, f"{name}_output")
            mutated = program.graph_signature.user_inputs_to_mutate
            mutated_inputs[name] = len(mutated)
            for index, tensor in enumerate(mutated.values()):
                self._add_note(
                    f"the model of '{name}' mutates its input '{tensor}': the program does not mutate it, but "
                    f"returns the new value as output {index}, before the model's outputs"
                )
        for variants in self._shape_variants.values():
            variants.infer_output_axes({name: [x.shape for x in each.outputs] for name, each in self._methods.items()})
        variant_dicts = {name: variants.to_dict() for name, variants in self._shape_variants.items()}
        tensors = {name: (x.inputs, x.outputs) for name, x in self._methods.items() if x.graph is not None}
        store_named_data(manager, METADATA_KEY, encode_metadata(tensors, mutated_inputs, shape_variants=variant_dicts))
