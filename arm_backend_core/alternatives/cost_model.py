"""What a small TOSA graph costs on an Ethos-U: cycles that Vela estimates and bytes of weights, asked once.

Answers are kept in this process, and on disk for those to come: by the graph's content, the configuration and Vela's
version. A folder that cannot be read or written costs the time of asking again, nothing else.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from arm_backend_core.alternatives.disk_cache import cache_folder, write
from arm_backend_core.tosa.graph import Graph
from arm_backend_core.tosa.serialize import serialize
from arm_backend_core.workers import vela
from arm_backend_core.workers.worker import WorkerDied, WorkerError

#: Seconds for one graph of a few operators, which takes milliseconds; what takes longer has no price.
_LONGEST = 20.0
#: Answers of one configuration that are kept on disk; the oldest go first.
_MOST = 20_000


class Price(NamedTuple):
    """Cycles, and bytes of encoded weights; ``total`` counts a byte as a cycle, which it takes to read from flash."""

    cycles: int
    weights: int

    @property
    def total(self) -> int:
        """What is compared."""
        return self.cycles + self.weights


#: By configuration: what this process knows, read from disk when the first question comes.
_known: dict[str, dict[str, Price | None]] = {}


class VelaCostModel:
    """Prices for one configuration of Vela."""

    def __init__(self, configuration: vela.Configuration) -> None:
        self._configuration = configuration

    def of(self, graphs: Sequence[Graph]) -> list[Price | None]:
        """Of each graph, as it is; None where Vela refuses it, crashes or takes too long."""
        contents = [serialize(graph) for graph in graphs]
        keys = [hashlib.blake2b(content, digest_size=12).hexdigest() for content in contents]
        asked = {key: content for key, content in zip(keys, contents, strict=True) if key not in self._answers}
        if asked:
            self._answers.update((key, self._ask(content)) for key, content in asked.items())
            self._keep()
        return [self._answers[key] for key in keys]

    def _ask(self, content: bytes) -> Price | None:
        try:
            answer, _ = vela.compile_tosa(content, self._configuration, _LONGEST)
        except (WorkerError, WorkerDied):
            return None
        return Price(answer["report"]["totalCycles"], answer["report"]["encodedWeights"])

    @cached_property
    def _name(self) -> str:
        parts = vela.version(), repr(self._configuration)
        return hashlib.blake2b("\n".join(parts).encode(), digest_size=12).hexdigest()

    @property
    def _file(self) -> Path:
        return cache_folder() / "prices" / f"{self._name}.json"

    @property
    def _answers(self) -> dict[str, Price | None]:
        if self._name not in _known:
            _known[self._name] = self._read()
        return _known[self._name]

    def _read(self) -> dict[str, Price | None]:
        with contextlib.suppress(OSError, ValueError, TypeError, AttributeError):  # somebody else's, or half gone
            found = json.loads(self._file.read_bytes())
            return {str(key): price and Price(int(price[0]), int(price[1])) for key, price in found.items()}
        return {}

    def _keep(self) -> None:
        """With what other processes have written meanwhile; what had no price may have one on another day."""
        every = [(key, price) for key, price in (self._read() | self._answers).items() if price is not None]
        with contextlib.suppress(OSError):
            self._file.parent.mkdir(parents=True, exist_ok=True)
            write(self._file, json.dumps(dict(every[-_MOST:])).encode())
