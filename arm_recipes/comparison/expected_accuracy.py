"""Expected task accuracy of an export: float model and quantized program on labelled samples, both run in PyTorch.

The program on the target differs from the quantized program in PyTorch by rounding only. ``compare`` runs the compiled
program itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.utils.data import DataLoader

from arm_recipes._internal.messages import suppress_warnings
from arm_recipes.comparison.accuracy import Accuracy, Evaluator, check_metric, flatten_labels
from arm_recipes.comparison.samples import prepare_samples
from arm_recipes.samples import export_arguments

if TYPE_CHECKING:
    from arm_recipes.pipeline.artifact import Artifact
    from arm_recipes.types import Labels, Metric, Model, Samples, Sizes


@dataclass(frozen=True)
class LabelledSamples:
    """Samples of an export with labels or a metric.

    Attributes:
        models: ``{method: model}``, with one entry.
        samples: ``{method: samples}``. In a list, the items after the model's inputs, such as labels, are removed from
            each sample. A ``DataLoader`` is unchanged.
        originals: the samples as the user passed them: a list or a ``DataLoader``.
        labels: int64 labels [N], or True if they follow the inputs in the samples, or None.
        metric: the metric, or None.
    """

    models: dict[str, Any]
    samples: dict[str, Any]
    originals: Any
    labels: Tensor | bool | None
    metric: Metric | None


def separate_labels(
    model: Model, samples: Samples | None, labels: Labels | bool | None, metric: Metric | None, sizes: Sizes | None
) -> LabelledSamples:
    """Separate the samples of an export from their labels. At least one of ``labels`` and ``metric`` must be given.

    Raises:
        ValueError: the program has several methods (the model's own, or one for each of ``sizes``), there are no
            samples, or ``labels`` or ``metric`` is invalid.
    """
    check_metric(metric)
    name = "metric" if labels is None else "labels"
    if labels is False:
        raise ValueError("labels=False: give class labels, True for the labels in the samples, or None")
    flat_labels = labels if labels is None or labels is True else flatten_labels(labels)
    models = export_arguments.models_by_method(model)
    if len(models) != 1 or sizes is not None:
        raise ValueError(
            f"{name}: needs a program with one method; export without {name}, and use result.compare(samples, "
            f"{name}=..., method=...) for each method"
        )
    ((method, module),) = models.items()
    resolved = export_arguments.resolve_loaders(samples.get(method) if isinstance(samples, Mapping) else samples)
    if resolved is None:
        raise ValueError(f"{name}: needs samples; give a list of input tuples, [(x,)], or a DataLoader")
    if isinstance(resolved, DataLoader):
        return LabelledSamples(models, {method: resolved}, resolved, flat_labels, metric)
    originals = export_arguments.to_sample_list(method, resolved)
    without_labels = [export_arguments.without_labels(module, sample) for sample in originals]
    return LabelledSamples(models, {method: without_labels}, originals, flat_labels, metric)


def measure_expected_accuracy(artifact: Artifact, labelled: LabelledSamples) -> Accuracy | None:
    """Measure the task accuracy of the only method. If the program comes from the cache, the model is quantized again.

    Raises:
        ValueError: samples, labels or outputs do not fit, or the metric returns no number.
    """
    (method,) = artifact.input_signatures
    prepared = prepare_samples(
        artifact.input_signatures[method], method, labelled.originals, labelled.labels, labelled.metric
    )
    quantized = artifact.exported_programs[method]
    original = artifact.float_reference.float_programs.get(method)
    captured = quantized if original is None else original.program
    with suppress_warnings():
        evaluator = Evaluator(captured, prepared.samples, prepared.originals, labelled.metric)
        return evaluator.task_accuracy(quantized, prepared.labels, has_padding=prepared.has_padding)
