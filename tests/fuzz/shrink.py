"""Makes a failing program small: takes away whatever the failure does not need."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from torch import Tensor

from tests.fuzz.program import Leaf, Program
from tests.ops.runner import Input

Fails = Callable[[Program], bool]


def shrink(program: Program, fails: Fails, seconds: float = 60.0) -> Program:
    """The smallest program found that still ``fails``; stops where nothing can be taken away, or after ``seconds``."""
    end = time.process_time() + seconds
    tried, finite = {program.source}, _runs(program, finite=True)
    smaller = True
    while smaller:
        smaller = False
        for candidate in _smaller(program):
            if time.process_time() > end:
                return program
            if candidate.source in tried or _size(candidate) >= _size(program):
                continue
            tried.add(candidate.source)
            if _runs(candidate, finite) and fails(candidate):
                program, smaller = candidate, True
                break
    return program


def _size(program: Program) -> tuple[int, ...]:
    constants = sum(leaf.constant for leaf in program.leaves)
    operands = sum(len(step.reads) for step in program.steps)
    elements = sum(torch.Size(leaf.drawn.shape).numel() for leaf in program.leaves)
    return len(program.steps), len(program.outputs), operands, constants, len(program.leaves), elements


def _runs(program: Program, finite: bool) -> bool:
    """Whether PyTorch runs it; a failure of ``finite`` numbers is not one of infinite ones."""
    try:
        values = [x for seed in range(3) for x in program.values(seed).values()]
    except Exception:
        return False
    return bool(program.outputs) and (not finite or all(bool(x.isfinite().all()) for x in values))


def _smaller(program: Program) -> Iterator[Program]:
    """Programs with something taken away, those that lose most first."""
    values = program.values()
    for i, step in enumerate(program.steps):  # returns what an early step makes
        returned = tuple(name for name in values if name.split("[")[0] == step.name)
        if i + 1 < len(program.steps):
            yield replace(program, steps=program.steps[: i + 1], outputs=returned).pruned()
    part = len(program.outputs)
    while part > 1:
        part = (part + 1) // 2
        for start in range(0, len(program.outputs), part):
            taken = program.outputs[start : start + part]
            yield replace(program, outputs=taken).pruned()
            left = program.outputs[:start] + program.outputs[start + part :]
            if left:
                yield replace(program, outputs=left).pruned()
        if part == 1:
            break
    for i, step in enumerate(program.steps):
        rest = replace(program, steps=(*program.steps[:i], *program.steps[i + 1 :]))
        results = {name: x for name, x in values.items() if name.split("[")[0] == step.name}
        names = [leaf.name for leaf in program.leaves] + [step.name for step in program.steps]
        unused = 1 + max(int(name[1:]) for name in names)
        leaves = tuple(Leaf(f"v{unused + n}", _input(x)) for n, x in enumerate(results.values()))
        fed = replace(rest, leaves=(*rest.leaves, *leaves))
        yield fed.replaced({name: leaf.name for name, leaf in zip(results, leaves, strict=True)}).pruned()
        for known, x in values.items():
            alike = [n for n, y in results.items() if y.shape == x.shape and y.dtype == x.dtype]
            if len(alike) == len(results) and known.split("[")[0] in step.reads:
                yield rest.replaced(dict.fromkeys(alike, known)).pruned()
    for i, leaf in enumerate(program.leaves):
        if leaf.constant:
            yield replace(program, leaves=_with(program, i, replace(leaf, constant=False)))
        for other in program.leaves[:i]:
            if other.drawn.shape == leaf.drawn.shape and other.drawn.dtype == leaf.drawn.dtype:
                yield program.replaced({leaf.name: other.name}).pruned()
        for axis, size in enumerate(leaf.drawn.shape):
            for fewer in sorted({1, size // 2, size - 1}):
                if 0 < fewer < size:
                    shape = (*leaf.drawn.shape[:axis], fewer, *leaf.drawn.shape[axis + 1 :])
                    yield replace(
                        program, leaves=_with(program, i, replace(leaf, drawn=replace(leaf.drawn, shape=shape)))
                    )


def _with(program: Program, index: int, leaf: Leaf) -> tuple[Leaf, ...]:
    return (*program.leaves[:index], leaf, *program.leaves[index + 1 :])


def _input(x: Tensor) -> Input:
    """Random numbers of the range that ``x`` has, and what it holds that is no number."""
    finite = x[x.isfinite()]
    special = tuple(float(number) for number in sorted({str(float(number)) for number in x[~x.isfinite()]}))
    if x.dtype is torch.bool or not finite.numel():
        return Input(tuple(x.shape), -2, 2, x.dtype, special)
    low, high = float(finite.min()), float(finite.max())
    return Input(tuple(x.shape), low, high if x.is_floating_point() else high + 1, x.dtype, special)
