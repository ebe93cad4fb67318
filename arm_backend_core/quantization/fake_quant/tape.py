"""Parameter tape: records the folding of parameters and replays it on their new values, with gradients.

The preparation of a program folds batch norms, standardizes weights, and concatenates and slices parameters, by calls
of PyTorch operators. Replaying these calls repeats the preparation at each training step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._subclasses import FakeTensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten
_ALIASES = (aten.detach.default, aten.alias.default, aten.lift_fresh.default)


@dataclass(frozen=True)
class _RecordedCall:
    function: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    results: tuple[Tensor, ...]


class ParameterTape(TorchDispatchMode):
    """While active, records each call of an operator that reads a root tensor or the result of a recorded call.

    Calls that write in place, or whose results are fake tensors, are not recorded. Tensors are identified by ``id``.
    The tape holds references to all of them, so that no ``id`` is reused.

    Args:
        roots: {name: root tensor}; the parameters and buffers whose new values ``replay`` takes.
    """

    def __init__(self, roots: Mapping[str, Tensor]) -> None:
        super().__init__()
        self._roots = dict(roots)
        self._known_tensors = {id(tensor): tensor for tensor in roots.values()}
        self._calls: list[_RecordedCall] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if any(id(x) in self._known_tensors for x in _tensors((args, kwargs))):
            results = _tensors(result)
            has_real_results = bool(results) and not any(isinstance(x, FakeTensor) for x in results)
            if has_real_results and not func._schema.is_mutable:
                self._known_tensors |= {id(x): x for x in results}
                self._calls.append(_RecordedCall(func, tuple(args), dict(kwargs or {}), tuple(results)))
        return result

    def keep_only(self, tensors: Iterable[Tensor]) -> None:
        """Drop the recorded calls that none of these tensors depends on."""
        needed, needed_calls = {id(x) for x in tensors}, []
        for call in reversed(self._calls):
            if any(id(x) in needed for x in call.results):
                needed |= {id(x) for x in _tensors((call.args, call.kwargs))}
                needed_calls.append(call)
        self._calls = needed_calls[::-1]
        tensors_in_use = [*self._roots.values(), *(x for call in needed_calls for x in call.results)]
        self._known_tensors = {id(x): x for x in tensors_in_use}

    def replay(self, root_value: Callable[[str], Tensor]) -> Callable[[Tensor], Tensor]:
        """Repeat the recorded calls on the current values of the roots.

        Args:
            root_value: returns the current value of a root by name.

        Returns:
            A function that returns the new value of a recorded tensor. It moves any other tensor to the device of the
            roots.
        """
        values = {id(tensor): root_value(name) for name, tensor in self._roots.items()}
        device = next((value.device for value in values.values()), None)

        def current(x: Any) -> Any:
            if isinstance(x, Tensor):
                return values[id(x)] if id(x) in values else x.to(device) if device is not None else x
            return device if isinstance(x, torch.device) and device is not None else x

        for call in self._calls:
            args, kwargs = pytree.tree_map(current, (call.args, call.kwargs))
            result = args[0] if call.function in _ALIASES else call.function(*args, **kwargs)
            values |= {id(old): new for old, new in zip(call.results, _tensors(result), strict=True)}
        return current


def _tensors(value: Any) -> list[Tensor]:
    return [x for x in pytree.tree_leaves(value) if isinstance(x, Tensor)]
