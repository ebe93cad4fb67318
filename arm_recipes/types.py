"""Types of the arguments of the public functions, for annotations in user code and for type checkers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.export import ExportedProgram

from arm_recipes.samples.call_inputs import Inputs

_OneModel = torch.nn.Module | ExportedProgram | str | Path
Model = _OneModel | Mapping[str, _OneModel]
"""A model. A path names a file that ``torch.export.save`` wrote. A mapping maps method names to models."""

_Tensor = torch.Tensor | np.ndarray[Any, Any]
Sample = _Tensor | Inputs | tuple[Any, ...] | list[Any] | Mapping[str, Any]
"""Inputs of one call: ``Inputs``, a tuple or list of positional inputs, a mapping of keyword inputs, or one tensor."""

_SamplesOfMethod = tuple[Any, ...] | Iterable[Sample] | Callable[[], Iterable[Sample]]
Samples = _SamplesOfMethod | Mapping[str, _SamplesOfMethod]
"""An iterable of samples, such as a list or a ``DataLoader``, or a function that returns such an iterable.

A single tensor or tuple is one sample, but a tuple that contains only tuples and mappings is several samples. A mapping
maps each method name to its samples.
"""

Labels = int | _Tensor | Iterable[int | _Tensor]
"""Class labels: one for each item of the batches, in the order of the samples."""

Metric = Callable[[Any, Any], Any]
"""A function ``metric(outputs, sample)`` that returns a number; higher is better."""

Budget = Mapping[str, int | float | str]
"""Upper limits by kind of cost: ``cycles``, ``sram``, ``flash`` or ``traffic``.

A float is relative to the cost of the recipe's own program: 1.1 allows 10 % more. An int (cycles or bytes) or a text
such as ``512KiB`` is absolute.
"""

DynamicShapes = Mapping[str, Any] | tuple[Any, ...] | list[Any]
"""Dynamic dimensions, as in ``torch.export.export``; for several methods, by method name."""

Sizes = Mapping[str, Sequence[int]]
"""Sizes to compile for, by the name of the dimension, such as ``{"batch": [1, 8]}``."""
