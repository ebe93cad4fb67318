"""Quantization-aware training: the fake-quantized model, and the stage that trains it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Self, get_args

import torch
from executorch.export import QuantizationRecipe
from executorch.export.stages import PipelineArtifact
from torch import Tensor
from torch.export import ExportedProgram
from torch.fx import GraphModule
from torch.utils import _pytree as pytree

from arm_backend_core import compilation_log
from arm_backend_core.quantization.algorithms.cross_layer_equalization import equalize_model
from arm_backend_core.quantization.fake_quant.learned_step_size import QuantizationRange, RangeMode
from arm_backend_core.quantization.fake_quant.program import (
    FakeQuantProgram,
    StepSettings,
    activation_observers,
    set_qparams,
)
from arm_backend_core.quantization.fake_quant.training_layers import named_tensors
from arm_backend_core.quantization.non_finite import NonFiniteError
from arm_backend_core.quantization.observer import RangeObserver
from arm_backend_core.quantization.ptq import ObservedProgram
from arm_backend_core.scalar_kind import ScalarKind, kind_of
from arm_recipes._internal.compile_lock import compile_lock
from arm_recipes._internal.errors import ExportError
from arm_recipes._internal.messages import suppress_warnings
from arm_recipes.samples import export_arguments
from arm_recipes.samples.call_inputs import Inputs, InputSignature
from arm_recipes.stages.quantize import FastQuantizeStage, SetTrainedRanges, is_quantized, recipe_algorithms

#: Training steps after which the batch norm statistics are frozen.
BATCH_NORM_STEPS = 30
METHOD = "forward"


class FakeQuantizedModel(torch.nn.Module):
    """A model with fake quantization. It has the model's call signature, and rounds as the exported program does.

    The parameters with the prefix ``model.`` are the model's own. With ``ranges="learned"``, the parameters with the
    prefix ``ranges.`` scale the activation ranges. The state dict holds the complete training state of the model.

    Attributes:
        model: the model.
        ranges: ranges of the activations in program order. Their names contain the names of the program's tensors.
        steps: number of training steps (calls in training mode) so far.
        batch_norm_steps: number of training steps in which batch norms use batch statistics and update the running
            statistics. After these steps, the running statistics are frozen.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        stage: FastQuantizeStage,
        examples: Sequence[Inputs],
        *,
        ranges: RangeMode = "learned",
        batch_norm_steps: int = BATCH_NORM_STEPS,
    ) -> None:
        super().__init__()
        if ranges not in get_args(RangeMode):
            raise ValueError(f"ranges must be {' or '.join(map(repr, get_args(RangeMode)))}; got {ranges!r}")
        self.model, self.batch_norm_steps, self.steps = model, batch_norm_steps, 0
        self._stage, self._quantization = stage, stage.recipe
        self._examples = [_to_cpu(example) for example in examples]
        self._fake_quant_programs: dict[Hashable, FakeQuantProgram] = {}
        self._concat_choices: list[bool] | None = None
        self._input_signature = InputSignature.from_inputs(self._examples[0])
        device = self._device()
        model.cpu()  # observers compute on the CPU
        program = self._fake_quant_program(self._examples[0])
        self._initial_state = {
            name: named_tensors(model)[name].detach().clone() for name in program.state_names.values()
        }
        with torch.no_grad():
            stage.calibrate(METHOD, program.observed, self._examples)
            program.observed.finish_calibration()
        self._concat_choices = program.observed.concat_scales.apply()
        observers = activation_observers(program.observed)
        self._observer_settings = list(map(_observer_setting, observers))
        names = {observer: location for location, observer in reversed(program.observed.observers.items())}
        self.ranges = torch.nn.ModuleDict(
            {
                f"{index}_{_range_name(names[observer])}": QuantizationRange(observer, ranges)
                for index, observer in enumerate(observers)
            }
        )
        self.to(device)

    def forward(self, *args: Any, **keywords: Any) -> Any:
        """Compute the model with fake quantization.

        Inputs may have any shapes that the model accepts. The model is captured once for each combination of shapes and
        dtypes of the tensors, and values of the other inputs. A ``GraphModule`` accepts only the shapes that it was
        captured with.

        Raises:
            ValueError: the inputs differ from the samples in structure, are on another device than the parameters, or
                have other shapes than a ``GraphModule`` was captured with.
            ExportError: a parameter contains NaN or infinity, the model cannot be captured with these inputs, or it has
                other operators than when it was prepared.
        """
        sample = Inputs(*args, **keywords)
        leaves = self._input_signature.check_structure(sample, "the call")
        self._check_device(leaves)
        program, training = self._fake_quant_program(sample), self.training
        updates_batch_norms = training and self.steps < self.batch_norm_steps
        settings = StepSettings(self._quantization_ranges(), named_tensors(self.model), training, updates_batch_norms)
        try:
            results = program.run(leaves, settings)
        except NonFiniteError as error:
            raise ExportError(self._non_finite_message(str(error))) from error
        self.steps += training
        return results

    def export(self, samples: Any = None, **options: Any) -> Any:
        """Reject the call: the export that trains this model continues when the training function returns.

        Raises:
            ExportError: always.
        """
        raise ExportError("export() was called inside the training function: return from it, and the export continues")

    def trained_recipe(self) -> QuantizationRecipe:
        """The recipe that quantizes the model with the trained ranges.

        Raises:
            ExportError: a parameter or buffer contains NaN or infinity.
        """
        for name, tensor in [*self.named_parameters(), *self.named_buffers()]:
            if kind_of(tensor.dtype) is ScalarKind.FLOAT and not bool(tensor.isfinite().all()):
                raise ExportError(self._non_finite_message(f"'{name}' holds NaN or an infinity"))
        set_ranges = SetTrainedRanges(self.apply_ranges)
        return replace(
            self._quantization,
            is_qat=False,
            train_fn=None,
            pre_prepare_passes=None,
            pre_convert_passes=[*(self._quantization.pre_convert_passes or ()), set_ranges],
        )

    def apply_ranges(self, observed: ObservedProgram) -> None:
        """Set the trained ranges in a calibrated program."""
        self._apply_concat_choices(observed)
        compilation_log.current_log().notes.append(
            f"weights and ranges were trained for {self.steps} training steps with fake quantization"
        )
        observed.finish_calibration()  # before setting the ranges: later observations would change them
        for observer, quantization_range in zip(
            activation_observers(observed), self._quantization_ranges(), strict=True
        ):
            set_qparams(observer, quantization_range())

    def reset_state(self) -> None:
        """Reset the mutated buffers, such as a recurrent state, to the values that they had at preparation.

        Calls change these buffers, but an optimizer does not train them. They are also reset by a change from training
        to evaluation mode, and by the export.
        """
        tensors = named_tensors(self.model)
        with torch.no_grad():
            for name, initial in self._initial_state.items():
                tensors[name].copy_(initial)

    def train(self, mode: bool = True) -> Self:
        """Set the training flag of all modules. A change to evaluation mode also resets the mutated buffers.

        Captured modules do not implement ``train``, so the flags are set directly.
        """
        if self.training and not mode:
            self.reset_state()
        for module in self.modules():
            module.training = mode
        return self

    def get_extra_state(self) -> dict[str, int]:
        """The number of training steps, for ``state_dict``."""
        return {"steps": self.steps}

    def set_extra_state(self, state: Mapping[str, int]) -> None:
        """Restore the number of training steps."""
        self.steps = state["steps"]

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Return a copy with its own model and ranges, for example to average weights over steps."""
        memo |= {id(shared): shared for shared in self._objects_shared_by_copies()}
        memo |= _detach_computed_weights(self.model)
        memo[id(self)] = duplicate = type(self).__new__(type(self))
        # The copy captures its programs again.
        duplicate.__dict__ = copy.deepcopy({**self.__dict__, "_fake_quant_programs": {}}, memo)
        return duplicate

    def _objects_shared_by_copies(self) -> tuple[Any, ...]:
        """Objects that a deep copy shares with the original."""
        return self._quantization, self._stage

    def _fake_quant_program(self, sample: Inputs) -> FakeQuantProgram:
        leaves = self._input_signature.flatten(sample, "the call")
        key = tuple((x.shape, x.dtype) if isinstance(x, Tensor) else x for x in leaves)
        if key not in self._fake_quant_programs:
            if self._fake_quant_programs and isinstance(self.model, GraphModule):
                self._input_signature.check(sample, "the call")  # a captured graph has fixed shapes
            example = self._input_signature.unflatten([x.detach() if isinstance(x, Tensor) else x for x in leaves])
            with compile_lock(), suppress_warnings(), export_arguments.evaluation_mode({METHOD: self.model}):
                program = self._stage.capture(METHOD, self.model, example)
                if self._concat_choices is None and "cross_layer_equalization" in recipe_algorithms(self._quantization):
                    equalize_model(program, named_tensors(self.model))
                fake_quant_program = FakeQuantProgram(program, self._stage.insert_observers)
            if self._concat_choices is not None:
                self._apply_concat_choices(fake_quant_program.observed)
            self._fake_quant_programs[key] = fake_quant_program
        return self._fake_quant_programs[key]

    def _apply_concat_choices(self, observed: ObservedProgram) -> None:
        """Apply the concatenation scales that were chosen when the model was prepared.

        Raises:
            ExportError: the program has other quantized tensors than at preparation.
        """
        observed.concat_scales.apply(self._concat_choices)
        if list(map(_observer_setting, activation_observers(observed))) != self._observer_settings:
            shapes = ", ".join(str(tuple(x.shape)) for x in self._input_signature.leaves if isinstance(x, Tensor))
            raise ExportError(
                "with these inputs and weights, the model has other operators than when it was prepared with samples "
                f"of shapes {shapes}: train and export with these shapes, or prepare it with samples of the new shapes"
            )

    def _quantization_ranges(self) -> list[QuantizationRange]:
        return [module for module in self.ranges.values() if isinstance(module, QuantizationRange)]

    def _device(self) -> torch.device:
        return next((x.device for x in named_tensors(self.model).values()), torch.device("cpu"))

    def _check_device(self, leaves: Sequence[Any]) -> None:
        devices = {name: x.device for name, x in [*self.named_parameters(), *self.named_buffers()]}
        devices |= {
            f"input '{name}'": x.device
            for name, x in zip(self._input_signature.names, leaves, strict=True)
            if isinstance(x, Tensor)
        }
        if len(set(devices.values())) > 1:
            first = next(iter(devices.items()))
            other = next((name, device) for name, device in devices.items() if device != first[1])
            raise ValueError(
                f"{first[0]} is on {first[1]} and {other[0]} is on {other[1]}: move the prepared model and all inputs "
                f'to one device, for example prepared.to("{other[1]}")'
            )

    def _non_finite_message(self, problem: str) -> str:
        return (
            f"after {self.steps} training steps {problem}: restore an earlier state dict, and train with a smaller "
            "learning rate, clipped gradients (torch.nn.utils.clip_grad_norm_), or data without NaN"
        )


def model_to_train(models: Mapping[str, Any]) -> torch.nn.Module:
    """Return the model to train, as a module.

    Raises:
        ValueError: there are several models, or the model is already quantized.
    """
    if len(models) != 1:
        raise ValueError(
            f"quantization-aware training takes one method, not {', '.join(models)}: train and export each method "
            "separately; for several input sizes of one method, use prepare_qat(...).export(sizes=...)"
        )
    (model,) = models.values()
    if isinstance(model, (ExportedProgram, GraphModule)) and is_quantized(model.graph):
        raise ValueError("the model is quantized already: export keeps its scales and zero points as they are")
    module: torch.nn.Module = model.module(check_guards=False) if isinstance(model, ExportedProgram) else model
    return module


def _detach_computed_weights(model: torch.nn.Module) -> dict[int, Any]:
    """Detach and copy the weights that pruning or weight normalization computes, for the memo of ``deepcopy``.

    ``deepcopy`` refuses tensors with gradient history. The next call of the model computes these weights again.

    Returns:
        ``{id(weight): copy}`` for each such weight.
    """
    values = [value for module in model.modules() for value in vars(module).values()]
    return {id(x): x.detach().clone() for x in values if isinstance(x, Tensor) and not x.is_leaf}


def _to_cpu(sample: Inputs) -> Inputs:
    args, keywords = pytree.tree_map_only(Tensor, Tensor.cpu, (tuple(sample), sample.keywords))
    return Inputs(*args, **keywords)


def _observer_setting(observer: RangeObserver) -> tuple[Any, ...]:
    return type(observer), observer.dtype, observer.quant_min, observer.quant_max


def _range_name(location: Any) -> str:
    return str(location.name) if isinstance(location, torch.fx.Node) else f"{location[0].name}_for_{location[1].name}"


class TrainingQuantizeStage(FastQuantizeStage):
    """The quantization stage of recipes with training: the recipe's function first trains a copy of the model."""

    def run(self, artifact: PipelineArtifact) -> None:
        """Train, then quantize.

        Raises:
            ValueError: the model cannot be trained, ``train_fn`` is missing, or as ``FastQuantizeStage.run``.
            AccuracyError, ExportError: as ``FastQuantizeStage.run``.
        """
        if self._quantization_recipe.is_qat and self.has_single_arm_quantizer:
            trained = self._train_copy(artifact.data, artifact.get_context("example_inputs"))
            artifact = artifact.copy_with_new_data(trained)
        super().run(artifact)

    def _train_copy(self, models: Mapping[str, Any], examples: Mapping[str, list[Inputs]]) -> dict[str, Any]:
        """Train a copy of the model with the recipe's function, and set the recipe that quantizes it."""
        train: Callable[[Any], Any] | None = self._quantization_recipe.train_fn
        if train is None:
            raise ValueError("is_qat=True needs train_fn, a function that trains the model that it is given")
        ((method, model),) = models.items() if len(models) == 1 else (("", model_to_train(models)),)
        if isinstance(model, (ExportedProgram, GraphModule)) and is_quantized(model.graph):
            return dict(models)
        module = model_to_train(models)
        duplicate = copy.deepcopy(module, _detach_computed_weights(module))
        prepared = FakeQuantizedModel(duplicate, self, examples[method])
        with torch.enable_grad():
            train(prepared)
        self._quantization_recipe = prepared.trained_recipe()
        prepared.eval().reset_state()
        return {method: prepared.model}
