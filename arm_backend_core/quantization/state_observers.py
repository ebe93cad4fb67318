"""Observers of state that several methods share: a buffer has one type and one scale in all of them."""

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
        model: the method.
        state: the buffer.
        value: its new value.
        write: the operator that writes it.
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
        """Whether the method changes the buffer. A method that only reads it writes its unchanged value back."""
        value = self.value
        while value.target is torch.ops.aten.clone.default:
            value = value.all_input_nodes[0]
        return value is not self.state

    @property
    def priority(self) -> int:
        """2 if the method only reads the buffer. If it changes the buffer: 0 (highest) with parameters, 1 without."""
        return 2 if not self.changes_value else 0 if self.model.has_parameters else 1

    def set_observer(self, observer: Any) -> None:
        """Observe the buffer and its new value by ``observer``."""
        self.model.observers[self.state] = self.model.observers[self.value, self.write] = observer


def unify_state_observers(models: Iterable[ObservedProgram]) -> None:
    """Give each buffer that several methods write observers of one type and dtype in all of them.

    The methods that have parameters and change the buffer decide: the widest of their types applies. If there are none,
    the methods that change the buffer decide. If no method changes the buffer, the methods that read it decide. A
    method without parameters that only resets the state therefore does not affect the other methods. Afterwards,
    ``share_observers_across_methods`` merges the observers of a buffer.
    """
    uses: dict[TensorIdentity, list[_StateUse]] = {}
    for model in models:
        for use in filter(lambda use: is_float(use.state), _uses_of_state(model)):
            uses.setdefault(model.tensor_ids[use.state], []).append(use)
    for shared in uses.values():
        if len(shared) > 1:
            _unify(shared)


class InterleavedCalibration:
    """Calibrates methods on the states that another method leaves, and then restores these states.

    Methods are calibrated one after the other. Without interleaving, a method that reads the state would be calibrated
    on the final state only, and a method that clears it on almost only zeros.

    Args:
        methods: by name, each with its samples.
    """

    def __init__(self, methods: Mapping[str, tuple[ObservedProgram, Iterable[Any]]]) -> None:
        self._priorities = {name: _priority_of_method(model) for name, (model, _) in methods.items()}
        self._methods = {name: (model, cycle(samples)) for name, (model, samples) in methods.items()}

    def run(self, method: str) -> None:
        """Run the next sample of each method with a lower priority than ``method``."""
        for name, (model, samples) in self._methods.items():
            if self._priorities[name] > self._priorities[method]:
                sample = next(samples)
                with model.preserve_states():
                    model(*sample, **getattr(sample, "keywords", {}))


def _priority_of_method(model: ObservedProgram) -> int:
    """The highest priority (lowest number) of a method's uses of buffers; 0 without a use."""
    return min((use.priority for use in _uses_of_state(model)), default=0)


def _uses_of_state(model: ObservedProgram) -> list[_StateUse]:
    """List the buffers that a method writes, including those to which it writes their unchanged value."""
    writes = model.graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default)
    uses = [_StateUse(model, *cast(tuple[Node, Node], write.args[:2]), write) for write in writes]
    return [use for use in uses if is_state(use.state)]


def _unify(uses: Sequence[_StateUse]) -> None:
    """Give the uses of one buffer a common observer, if any of them is quantized."""
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
