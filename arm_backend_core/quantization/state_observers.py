"""Observers of buffers that several methods share: all methods use one dtype and one scale for a buffer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import TYPE_CHECKING, Any, cast

import torch
from torch.fx import Node

from arm_backend_core.nodes import is_float, is_state
from arm_backend_core.program import TensorIdentity
from arm_backend_core.quantization.observer import FixedRangeObserver, RangeObserver

if TYPE_CHECKING:
    from arm_backend_core.quantization.ptq import ObservedProgram


@dataclass(frozen=True)
class _StateUse:
    """A method's use of a buffer.

    Attributes:
        model: the observed program of the method.
        state: the node of the buffer.
        value: the node of the buffer's new value.
        write: the ``copy_`` node that writes the new value to the buffer.
    """

    model: ObservedProgram
    state: Node
    value: Node
    write: Node

    @property
    def observer(self) -> Any:
        """Observer of the buffer in this method; None if the method does not quantize the buffer."""
        return self.model.observers.get(self.state)

    @property
    def changes_value(self) -> bool:
        """Whether the method changes the buffer. If it only reads the buffer, ``write`` copies the unchanged value."""
        value = self.value
        while value.target is torch.ops.aten.clone.default:
            value = value.all_input_nodes[0]
        return value is not self.state

    @property
    def priority(self) -> int:
        """Priority of the method in the choice of the buffer's observer; 0 is the highest.

        0: the method has parameters and changes the buffer. 1: it changes the buffer, but has no parameters. 2: it only
        reads the buffer.
        """
        return 2 if not self.changes_value else 0 if self.model.has_parameters else 1

    def set_observer(self, observer: Any) -> None:
        """Use ``observer`` for the buffer and for its new value."""
        self.model.observers[self.state] = self.model.observers[self.value, self.write] = observer


def unify_state_observers(models: Iterable[ObservedProgram]) -> None:
    """If several methods use a buffer, give it observers of one class and dtype in all of these methods.

    The dtype is the widest among the observers of the methods with the highest priority (``_StateUse.priority``). These
    are the methods that have parameters and change the buffer. If there are none, they are the methods that change the
    buffer; if no method changes it, the methods that read it. A method without parameters that only resets the state
    therefore does not affect the other methods. Afterwards, ``share_observers_across_methods`` merges the observers of
    a buffer.
    """
    uses: dict[TensorIdentity, list[_StateUse]] = {}
    for model in models:
        for use in filter(lambda use: is_float(use.state), _uses_of_state(model)):
            uses.setdefault(model.tensor_ids[use.state], []).append(use)
    for shared in uses.values():
        if len(shared) > 1:
            _unify(shared)


class InterleavedCalibration:
    """Calibrates methods on the buffer values that the samples of another method leave.

    The quantization calibrates one method after the other. Without interleaving, a method that reads the state would be
    calibrated on the final state only. A method that clears the state would be calibrated on values that are almost all
    0.

    Args:
        methods: {name of the method: (its observed program, its samples)}.
    """

    def __init__(self, methods: Mapping[str, tuple[ObservedProgram, Iterable[Any]]]) -> None:
        self._priorities = {name: _priority_of_method(model) for name, (model, _) in methods.items()}
        self._methods = {name: (model, cycle(samples)) for name, (model, samples) in methods.items()}

    def run(self, method: str) -> None:
        """Run the next sample of each method with a lower priority than ``method``, and restore the buffers afterwards.

        Called after each calibration sample of ``method``.
        """
        for name, (model, samples) in self._methods.items():
            if self._priorities[name] > self._priorities[method]:
                sample = next(samples)
                with model.preserve_states():
                    model(*sample, **getattr(sample, "keywords", {}))


def _priority_of_method(model: ObservedProgram) -> int:
    """The highest priority (lowest number) among a method's uses of buffers; 0 if it uses none."""
    return min((use.priority for use in _uses_of_state(model)), default=0)


def _uses_of_state(model: ObservedProgram) -> list[_StateUse]:
    """List a method's uses of buffers by its ``copy_`` nodes. A buffer that it only reads also has such a node."""
    writes = model.graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default)
    uses = [_StateUse(model, *cast(tuple[Node, Node], write.args[:2]), write) for write in writes]
    return [use for use in uses if is_state(use.state)]


def _unify(uses: Sequence[_StateUse]) -> None:
    """Give all uses of a buffer observers of one class and dtype, if any method quantizes the buffer."""
    observed = [use for use in uses if use.observer is not None]
    if not observed:
        return
    priority = min(use.priority for use in observed)
    deciding = [use.observer for use in observed if use.priority == priority]
    widest = max(deciding, key=lambda observer: int(observer.quant_max)).dtype
    candidates = [observer for observer in deciding if observer.dtype is widest]
    common = next((one for one in candidates if isinstance(one, RangeObserver)), None)
    if common is None:
        common = FixedRangeObserver(candidates[0])
    for use in uses:
        if type(use.observer) is not type(common) or use.observer.dtype is not widest:
            use.set_observer(common)
