"""Shrinking (delta debugging): removes parts of a failing program that the failure does not need."""

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
    """Return the smallest program found that still ``fails``; stops after ``seconds`` of processor time."""
    end = time.process_time() + seconds
    tried, finite = {program.source}, _is_runnable(program, finite=True)
    smaller = True
    while smaller:
        smaller = False
        for candidate in _smaller_programs(program):
            if time.process_time() > end:
                return program
            if candidate.source in tried or _size_key(candidate) >= _size_key(program):
                continue
            tried.add(candidate.source)
            if _is_runnable(candidate, finite) and fails(candidate):
                program, smaller = candidate, True
                break
    return program


def _size_key(program: Program) -> tuple[int, ...]:
    constants = sum(leaf.constant for leaf in program.leaves)
    operands = sum(len(step.reads) for step in program.steps)
    elements = sum(torch.Size(leaf.spec.shape).numel() for leaf in program.leaves)
    return len(program.steps), len(program.outputs), operands, constants, len(program.leaves), elements


def _is_runnable(program: Program, finite: bool) -> bool:
    """Whether PyTorch runs the program and, with ``finite``, all values are finite."""
    try:
        values = [x for seed in range(3) for x in program.values(seed).values()]
    except Exception:
        return False
    return bool(program.outputs) and (not finite or all(bool(x.isfinite().all()) for x in values))


def _smaller_programs(program: Program) -> Iterator[Program]:
    """Yield programs with a part removed, the largest removals first."""
    values = program.values()
    for i, step in enumerate(program.steps):  # return the result of an early step
        returned = tuple(name for name in values if name.split("[")[0] == step.name)
        if i + 1 < len(program.steps):
            yield replace(program, steps=program.steps[: i + 1], outputs=returned).prune()
    part = len(program.outputs)
    while part > 1:
        part = (part + 1) // 2
        for start in range(0, len(program.outputs), part):
            kept_outputs = program.outputs[start : start + part]
            yield replace(program, outputs=kept_outputs).prune()
            other_outputs = program.outputs[:start] + program.outputs[start + part :]
            if other_outputs:
                yield replace(program, outputs=other_outputs).prune()
        if part == 1:
            break
    for i, step in enumerate(program.steps):
        rest = replace(program, steps=(*program.steps[:i], *program.steps[i + 1 :]))
        results = {name: x for name, x in values.items() if name.split("[")[0] == step.name}
        names = [leaf.name for leaf in program.leaves] + [step.name for step in program.steps]
        unused = 1 + max(int(name[1:]) for name in names)
        leaves = tuple(Leaf(f"v{unused + n}", _describe_input(x)) for n, x in enumerate(results.values()))
        with_leaves = replace(rest, leaves=(*rest.leaves, *leaves))
        yield with_leaves.replace_references(
            {name: leaf.name for name, leaf in zip(results, leaves, strict=True)}
        ).prune()
        for known, x in values.items():
            same_type = [n for n, y in results.items() if y.shape == x.shape and y.dtype == x.dtype]
            if len(same_type) == len(results) and known.split("[")[0] in step.reads:
                yield rest.replace_references(dict.fromkeys(same_type, known)).prune()
    for i, leaf in enumerate(program.leaves):
        if leaf.constant:
            yield replace(program, leaves=_replace_leaf(program, i, replace(leaf, constant=False)))
        for other in program.leaves[:i]:
            if other.spec.shape == leaf.spec.shape and other.spec.dtype == leaf.spec.dtype:
                yield program.replace_references({leaf.name: other.name}).prune()
        for axis, size in enumerate(leaf.spec.shape):
            for fewer in sorted({1, size // 2, size - 1}):
                if 0 < fewer < size:
                    shape = (*leaf.spec.shape[:axis], fewer, *leaf.spec.shape[axis + 1 :])
                    yield replace(
                        program, leaves=_replace_leaf(program, i, replace(leaf, spec=replace(leaf.spec, shape=shape)))
                    )


def _replace_leaf(program: Program, index: int, leaf: Leaf) -> tuple[Leaf, ...]:
    return (*program.leaves[:index], leaf, *program.leaves[index + 1 :])


def _describe_input(x: Tensor) -> Input:
    """Describe an input with random numbers in the range of ``x``, and its infinities and NaN."""
    finite = x[x.isfinite()]
    special = tuple(float(number) for number in sorted({str(float(number)) for number in x[~x.isfinite()]}))
    if x.dtype is torch.bool or not finite.numel():
        return Input(tuple(x.shape), -2, 2, x.dtype, special)
    low, high = float(finite.min()), float(finite.max())
    return Input(tuple(x.shape), low, high if x.is_floating_point() else high + 1, x.dtype, special)
