"""Protocols of the comparison results that the HTML page shows.

``arm_recipes.report`` must not import ``arm_recipes.comparison``, so these protocols stand for its classes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

from arm_recipes._internal.rendering import Section


class ErrorSummary(Protocol):
    """The error of a tensor."""

    @property
    def sqnr(self) -> float:
        """SQNR in dB; infinite if the tensors are equal."""


class LayerAccuracy(Protocol):
    """The accuracy of one layer, as measured by ``arm_recipes.comparison``."""

    @property
    def name(self) -> str:
        """Name of the node in the captured program."""

    @property
    def module(self) -> str:
        """Path of the module."""

    @property
    def operator(self) -> str:
        """ATen operator."""

    @property
    def source(self) -> str:
        """Line of the model's source code."""

    @property
    def gap(self) -> ErrorSummary:
        """Error of the layer's output in the whole program, including the errors of preceding layers."""

    @property
    def isolated(self) -> ErrorSummary | None:
        """Error that the layer itself adds; None if it was not measured."""


class TaskAccuracy(Protocol):
    """Accuracy of the task (``arm_recipes.comparison.accuracy.Accuracy``)."""

    @property
    def metric(self) -> str:
        """Name of the metric."""

    @property
    def items(self) -> int:
        """Number of items that the metric is averaged over."""

    @property
    def figures(self) -> tuple[str, str]:
        """Value of the metric for the reference and for the program, as text."""

    @property
    def drop_figure(self) -> str:
        """Difference between the reference's and the program's metric, as text."""

    def rows(self, reference: str) -> list[tuple[str, ...]]:
        """Rows of a table; ``reference`` is the name of the reference."""


class ComparisonRecord(Protocol):
    """A comparison of a program with its model (``arm_recipes.comparison.result.Comparison``)."""

    @property
    def method(self) -> str:
        """Name of the method."""

    @property
    def program(self) -> str:
        """Description of the program that was compared."""

    @property
    def reference(self) -> str:
        """Description of the reference."""

    @property
    def samples(self) -> int:
        """Number of samples."""

    @property
    def sqnr(self) -> float:
        """SQNR of the first output that is a tensor, in dB; NaN if no output is a tensor."""

    @property
    def accuracy(self) -> TaskAccuracy | None:
        """Accuracy of the task; None if the comparison had neither labels nor a metric."""

    @property
    def layers(self) -> Sequence[LayerAccuracy]:
        """Layers in program order."""

    def sections(self) -> Iterator[Section]:
        """Sections of the comparison."""
