"""Graphs with two Vela bugs at adjacent operators: one reproducer feeds the other, or both read one tensor."""

from __future__ import annotations

import random
from collections.abc import Sequence

from arm_backend_core.dtype import DType
from arm_backend_core.errors import Unsupported
from arm_backend_core.targets.target import Target
from arm_backend_core.tosa.builder import Builder
from arm_backend_core.tosa.graph import Graph, Value, prod
from arm_backend_core.tosa.passes import peephole_movement
from arm_backend_core.tosa.passes.pipeline import run, run_last_passes
from arm_backend_core.tosa.passes.rewrite import rewrite_to_fixpoint
from tests.runtime.vela_bugs import COMPILED_CORRECTLY, READ_AS_UNSIGNED, REPRODUCERS, Reproducer
from tests.tosa_graphs import build_graph, make_target


def draw(seed: int, accelerator: str) -> Reproducer:
    """Build pair number ``seed`` from reproducers that the accelerator supports; a seed determines the pair."""
    rng = random.Random(seed)
    known = [row for row in (*REPRODUCERS, *COMPILED_CORRECTLY) if accelerator in row.accelerators]
    while True:
        first, second = rng.choice([row for row in known if accelerator in row.wrong]), rng.choice(known)
        pair = _pair(first, second, rng)
        try:
            build_graph(pair.body, *pair.inputs, target=make_target(accelerator))
        except Unsupported:  # the accelerator does not support the adapting operators
            continue
        return pair


def run_passes(pair: Reproducer, target: Target, seed: int) -> Graph:
    """Run all passes for odd seeds. For even seeds run only the last ones, which keep more operators adjacent."""
    written = build_graph(pair.body, *pair.inputs, target=target)
    written.remove_dead()
    if seed % 2:
        run(written, target)
    else:
        rewrite_to_fixpoint(written, target, {"IDENTITY": peephole_movement.RULES["IDENTITY"]})
        run_last_passes(written, target)
    return written


def _pair(first: Reproducer, second: Reproducer, rng: random.Random) -> Reproducer:
    """Join two graphs: one input of ``second`` becomes a result or an input of ``first``."""
    place, number, shares, both = (
        rng.randrange(len(second.inputs)),
        rng.random(),
        rng.random() < 0.3 and READ_AS_UNSIGNED.isdisjoint((first.name, second.name)),
        rng.random() < 0.5,
    )
    count, fitting = len(first.inputs), rng.randrange(1 << 30)
    shape, dtype = second.inputs[place]

    def body(b: Builder, *values: Value) -> tuple[Value, ...]:
        results = _results(first.body(b, *values[:count]))
        candidates = values[:count] if shares else results
        source = candidates[int(number * len(candidates))]
        operands = list(values[count:])
        operands.insert(place, _adapt(b, source, shape, dtype, random.Random(fitting)))
        returned = _results(second.body(b, *operands))
        return (*(x for x in results if both or x is not source), *returned)

    others = [x for i, x in enumerate(second.inputs) if i != place]
    name = f"{first.name}, {'beside' if shares else 'before'} {second.name}"
    return Reproducer(name, body, (*first.inputs, *others), ())


def _results(returned: Value | tuple[Value, ...]) -> tuple[Value, ...]:
    return returned if isinstance(returned, tuple) else (returned,)


def _adapt(b: Builder, x: Value, shape: Sequence[int], dtype: DType, rng: random.Random) -> Value:
    """Adapt ``x`` to another shape and type: slice or repeat it, and reshape it."""
    x = _convert(b, x, dtype, rng)
    if x.rank == len(shape) and all(has >= wants for has, wants in zip(x.shape, shape, strict=True)):
        starts = [rng.randint(0, has - wants) for has, wants in zip(x.shape, shape, strict=True)]
        return x if x.shape == tuple(shape) else b.slice(x, starts, shape)
    size = prod(shape)
    if x.size != size:
        x = b.reshape(x, (x.size,))
        x = b.concat([x] * -(-size // x.size), 0) if x.size < size else x
        x = x if x.size == size else b.slice(x, (rng.randint(0, x.size - size),), (size,))
    return b.reshape(x, shape)


def _convert(b: Builder, x: Value, dtype: DType, rng: random.Random) -> Value:
    if x.dtype is dtype:
        return x
    if dtype is DType.BOOL:
        return b.compare("GREATER", _convert(b, x, DType.INT32, rng), b.const(0, DType.INT32))
    if x.dtype is DType.BOOL:
        return b.cast(x, dtype)
    scales = {
        (DType.INT8, DType.INT16): (128.0, 1.0),
        (DType.INT8, DType.INT32): (1.0, 16.0),
        (DType.INT16, DType.INT32): (1.0, 2.0),
        (DType.INT16, DType.INT8): (1 / 256, 1.0),
        (DType.INT32, DType.INT8): (1 / 64, 2.0**-24),
        (DType.INT32, DType.INT16): (1 / 64, 2.0**-16),
    }
    return b.rescale(x, dtype, rng.choice(scales[x.dtype, dtype]))
