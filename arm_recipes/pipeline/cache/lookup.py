"""Cache look-up of an export: finds the program in the cache, or stores it after the export."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from executorch.export import ExportRecipe
from torch.export import ExportedProgram

from arm_recipes._internal.messages import warn
from arm_recipes.pipeline.artifact import Artifact, ExportObjects
from arm_recipes.pipeline.cache.digest import NotCacheable
from arm_recipes.pipeline.cache.key import DigestedCalibration, compute_cache_key
from arm_recipes.pipeline.cache.store import CacheEntry, CorruptEntry, Store
from arm_recipes.recipe.recipe import ArmRecipe
from arm_recipes.samples.calibration import Calibration
from arm_recipes.samples.call_inputs import InputSignature
from arm_recipes.samples.shape_variants import ShapeVariants

if TYPE_CHECKING:
    from arm_recipes.pipeline.pipeline import Pipeline
    from arm_recipes.samples.export_arguments import Examples, Model


class ExportCacheLookup:
    """The cache look-up of one export.

    Attributes:
        recipe: a copy of the user's recipe, whose calibration iterator also computes a digest of the samples that the
            export reads (``DigestedCalibration``). Without calibration data, ``recipe`` is the user's recipe.
        notes: notes for the report.

    Raises:
        ValueError: the folder is not writable.
    """

    def __init__(
        self,
        folder: str | Path,
        recipe: ExportRecipe,
        models: Mapping[str, Model],
        examples: Examples,
        shape_variants: Mapping[str, ShapeVariants],
        constant_methods: Mapping[str, Any] | None,
    ) -> None:
        self._store = Store(folder)
        self._original_recipe, self._models, self._examples = recipe, models, examples
        self._shape_variants, self._constant_methods = shape_variants, constant_methods
        self._key: str | None = None
        self._key_sample_digests: frozenset[str] = frozenset()
        self._digested_calibration: DigestedCalibration | None = None
        self.recipe = self._wrap_calibration(recipe)
        self.notes: list[str] = []

    def _wrap_calibration(self, recipe: ExportRecipe) -> ExportRecipe:
        """Copy a recipe with ``DigestedCalibration`` around its calibration data."""
        quantization = recipe.quantization_recipe
        source: Any = None if quantization is None else quantization.calibration_inputs_fn
        if not isinstance(source, Calibration):
            return recipe
        self._digested_calibration = DigestedCalibration(source)
        new_recipe, new_quantization = copy.copy(recipe), copy.copy(quantization)
        assert new_quantization is not None
        new_quantization.calibration_inputs_fn = self._digested_calibration
        new_recipe.quantization_recipe = new_quantization
        return new_recipe

    def look_up(self, pipeline: Pipeline, notes: Sequence[str], run_export: Callable[[], Artifact]) -> Artifact | None:
        """Look up an identical export; None if there is none, its file is damaged, or this export cannot be cached.

        Args:
            pipeline: captures the models, for the key.
            notes: notes about the arguments, which are part of the report.
            run_export: runs the export, to create the objects that the cache does not store.
        """
        start = time.perf_counter()
        programs = pipeline.capture_programs()
        captured = time.perf_counter()
        try:
            self._key = self._compute_key(programs, notes)
            entry = self._store.read(self._key)
        except NotCacheable as uncacheable:
            self._add_note(f"cache_dir: this export is not cached, because the cache key cannot include {uncacheable}")
            return None
        except CorruptEntry as reason:
            self._add_note(f"cache_dir: '{self._store.file(self._key or '')}' is ignored and replaced: {reason}")
            return None
        if entry is None:
            return None
        for text in entry.warnings:
            warn(text)
        shapes = {method.name: [output.shape for output in method.outputs] for method in entry.report.methods}
        for variants in self._shape_variants.values():
            variants.infer_output_axes({name: shapes[name] for name in variants.sizes_by_method})
        note = "the program was taken from cache_dir: an earlier export had the same model, samples and recipe"
        seconds = {"torch_export": captured - start, "cache": time.perf_counter() - captured}
        report = replace(entry.report, seconds=seconds, notes=(*entry.report.notes, note), cached=True)
        input_signatures = {name: InputSignature.from_program(program) for name, program in programs.items()}
        out_specs = {name: program.call_spec.out_spec for name, program in programs.items()}
        export_objects = _DeferredExportObjects(programs, run_export)
        return Artifact(
            report,
            input_signatures,
            out_specs,
            self._shape_variants,
            self._original_recipe,
            export_objects,
            [entry.program],
            entry.data_file,
        )

    def store(self, result: Artifact, warnings: Sequence[str]) -> None:
        """Store an export and add the notes to its report.

        An export is not stored if it cannot be cached, or if calibration did not read the samples that are in the key.
        """
        if self._digested_calibration is not None and self._digested_calibration.digests != self._key_sample_digests:
            self._key = None
            self._add_note(
                "cache_dir: this export is not cached, because its calibration data differ each time they are read"
            )
        if self._key is not None:
            program = b"".join(result.program_chunks)
            try:
                self._store.write(self._key, CacheEntry(result.report, program, tuple(warnings), result.data_file))
            except OSError as error:  # the export itself is complete
                self._add_note(f"cache_dir: this export is not cached, because its file cannot be written: {error}")
        result.report = replace(result.report, notes=(*result.report.notes, *self.notes))

    def _compute_key(self, programs: Mapping[str, ExportedProgram], notes: Sequence[str]) -> str:
        recipe = self.recipe
        if not isinstance(recipe, ArmRecipe):
            raise NotCacheable("a combined recipe or a recipe of another package")
        for option, what in (("qat", "the training function (qat)"), ("dump_dir", "the files in dump_dir")):
            if recipe.options.get(option) is not None:
                raise NotCacheable(what)
        if self._digested_calibration is not None:
            for program in programs.values():
                self._digested_calibration.read_all(InputSignature.from_program(program))
            self._key_sample_digests = frozenset(self._digested_calibration.digests)
        variants = {name: method.to_dict() for name, method in self._shape_variants.items()}
        extra = variants, self._constant_methods, list(notes), sorted(self._key_sample_digests)
        return compute_cache_key(recipe, self._models, programs, self._examples, extra)

    def _add_note(self, text: str) -> None:
        self.notes.append(text)
        warn(text)


class _DeferredExportObjects:
    """Runs the export to create the export objects of a cached artifact, if the model has not changed since the lookup.

    Raises:
        ValueError: the model has changed since the lookup.
    """

    def __init__(self, programs: Mapping[str, ExportedProgram], run_export: Callable[[], Artifact]) -> None:
        self._run_export = run_export
        self._versions = [
            (name, tensor, tensor._version)
            for program in programs.values()
            for name, tensor in {**program.state_dict, **program.constants}.items()
            if isinstance(tensor, torch.Tensor) and not tensor.is_inference()
        ]

    def __call__(self) -> ExportObjects:
        changed = next((name for name, tensor, version in self._versions if tensor._version != version), None)
        if changed is not None:
            raise ValueError(
                f"the model has changed since the export: '{changed}' was written. The cache does not store this part "
                "of the result, and it cannot be recomputed. Access it before further training, or export again"
            )
        return self._run_export().export_objects
