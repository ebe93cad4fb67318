"""Cost model: Vela's cached estimate of cycles, weight bytes and SRAM for a small TOSA graph on an Ethos-U.

The cache is in memory and on disk. Its keys are the content of the graph, the configuration and the version of Vela. If
the cache folder cannot be read or written, Vela computes the estimates again.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from arm_backend_core.disk_cache import cache_folder, write_atomically
from arm_backend_core.tosa.graph import Graph
from arm_backend_core.tosa.serialize import serialize
from arm_backend_core.workers import vela
from arm_backend_core.workers.worker import WorkerDied, WorkerError

#: Time limit of Vela for one graph, which usually takes milliseconds. If Vela takes longer, the estimate is None.
_TIMEOUT_SECONDS = 20.0
#: Maximum number of estimates on disk for one configuration. The oldest are dropped first.
_MAX_CACHED = 20_000


class Cost(NamedTuple):
    """Estimated cost of a graph.

    Attributes:
        cycles: cycles of the NPU, including waits for memory.
        weight_bytes: bytes of encoded weights.
        sram_bytes: peak use of SRAM.
    """

    cycles: int
    weight_bytes: int
    sram_bytes: int = 0

    @property
    def total(self) -> int:
        """Cycles plus weight bytes: the cost model counts one cycle for each byte that is read from flash."""
        return self.cycles + self.weight_bytes


#: {configuration key: {digest of the graph: estimate}}, loaded from disk on first use.
_cache: dict[str, dict[str, Cost | None]] = {}


class VelaCostModel:
    """Estimates the cost of graphs by Vela, for one configuration."""

    def __init__(self, configuration: vela.VelaConfiguration) -> None:
        self._configuration = configuration

    def estimate(self, graphs: Sequence[Graph]) -> list[Cost | None]:
        """Estimate the cost of each graph; None if Vela refuses it, crashes or exceeds the time limit."""
        contents = [serialize(graph) for graph in graphs]
        keys = [hashlib.blake2b(content, digest_size=12).hexdigest() for content in contents]
        missing = {key: content for key, content in zip(keys, contents, strict=True) if key not in self._estimates}
        if missing:
            self._estimates.update((key, self._run_vela(content)) for key, content in missing.items())
            self._save()
        return [self._estimates[key] for key in keys]

    def _run_vela(self, content: bytes) -> Cost | None:
        try:
            result, _ = vela.compile_tosa(content, self._configuration, _TIMEOUT_SECONDS)
        except (WorkerError, WorkerDied):
            return None
        report = result["report"]
        return Cost(report["totalCycles"], report["encodedWeights"], result["memories"].get("Sram", {}).get("peak", 0))

    @cached_property
    def _cache_key(self) -> str:
        parts = vela.version(), repr(self._configuration), repr(Cost._fields)
        return hashlib.blake2b("\n".join(parts).encode(), digest_size=12).hexdigest()

    @property
    def _cache_path(self) -> Path:
        return cache_folder() / "cycle_estimates" / f"{self._cache_key}.json"

    @property
    def _estimates(self) -> dict[str, Cost | None]:
        if self._cache_key not in _cache:
            _cache[self._cache_key] = self._load()
        return _cache[self._cache_key]

    def _load(self) -> dict[str, Cost | None]:
        # The file may be missing, truncated or in another format.
        with contextlib.suppress(OSError, ValueError, TypeError, AttributeError):
            rows = json.loads(self._cache_path.read_bytes())
            return {str(key): cost and Cost(*map(int, cost)) for key, cost in rows.items()}
        return {}

    def _save(self) -> None:
        """Save the estimates, merged with those of other processes. Failures are not saved: other processes retry."""
        merged = [(key, cost) for key, cost in (self._load() | self._estimates).items() if cost is not None]
        with contextlib.suppress(OSError):
            self._cache_path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(self._cache_path, json.dumps(dict(merged[-_MAX_CACHED:])).encode())
