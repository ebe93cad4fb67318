"""The sweep that local rules run in: one walk over the graph that offers each operator to its rules."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from arm_backend_core.errors import Unsupported
from arm_backend_core.targets.target import Target
from arm_backend_core.tosa.builder import Builder
from arm_backend_core.tosa.graph import Graph, Op, Value, together


class Rewriter:
    """What a rule may ask about the graph, and the builder that it writes with."""

    def __init__(self, graph: Graph, target: Target) -> None:
        self.build = Builder(graph, target)
        self._users = graph.users()
        self._outputs = set(graph.outputs)

    def users(self, value: Value) -> list[Op] | None:
        """Its readers when the sweep began; None when ``value`` leaves the graph or is new."""
        return None if value in self._outputs else self._users.get(value)

    def single_use(self, value: Value) -> bool:
        """Whether exactly one operator reads ``value``; False when that is not known in this sweep."""
        users = self.users(value)
        return users is not None and len(users) == 1

    def replaced(self, old: Value, new: Value) -> None:
        """Readers of ``old`` read ``new`` from now on."""
        if old in self._outputs:
            self._outputs.add(new)
        self._users[new] = self._users.get(new, []) + self._users.get(old, [])


#: Gives the value that replaces the operator's result, or None to leave the operator as it is.
Rule = Callable[[Op, Rewriter], Value | None]
Rules = Mapping[str, Sequence[Rule]]


def producer(value: Value, kind: str) -> Op | None:
    """The operator that made ``value`` if it is of this kind."""
    op = value.producer
    return op if op is not None and op.kind == kind else None


def past(value: Value, *kinds: str) -> Value:
    """What ``value`` is, before operators of these kinds."""
    while (op := value.producer) is not None and op.kind in kinds:
        value = op.inputs[0]
    return value


def sweep(graph: Graph, target: Target, rules: Rules) -> bool:
    """Offer every operator, in execution order, to ``rules[kind]``; True if anything was replaced.

    What a rule wrote before it gave None, or before the target refused an operator, is dead and removed.
    """
    graph.remove_dead()
    rewriter = Rewriter(graph, target)
    old, graph.ops = graph.ops, []
    replaced: dict[Value, Value] = {}
    made: dict[Op, list[Op]] = {}
    for op in old:
        op.inputs = [replaced.get(value, value) for value in op.inputs]
        rewriter.build.origins, mark = op.origins, len(graph.ops)
        result = _first(rules.get(op.kind, ()), op, rewriter)
        if result is None:
            graph.ops.append(op)
        else:
            assert (result.shape, result.dtype) == (op.output.shape, op.output.dtype), f"{op!r}: {result!r}"
            replaced[op.output], made[op] = result, graph.ops[mark:]
            rewriter.replaced(op.output, result)
    graph.outputs = [replaced.get(value, value) for value in graph.outputs]
    if replaced:
        graph.remove_dead()
        _hand_on(made, old, set(graph.ops))
    return bool(replaced)


#: What costs nothing any more where arithmetic takes it in.
_PLACES = ("IDENTITY", "RESHAPE", "TRANSPOSE")


def _hand_on(made: Mapping[Op, Sequence[Op]], old: Iterable[Op], live: Collection[Op]) -> None:
    """What died for others gives its origins to what stands for them: to those of its kind, or else to all.

    What a rule writes has the origins of the operator that it is for; where it stands for others of its own kind, only
    theirs: f(TRANSPOSE(x)) becomes TRANSPOSE(f(x)), and both keep what they have.

    Args:
        made: by the operators that were replaced, what was written for each.
        old: all operators before, in execution order.
    """
    seen = [each for op in old for each in (op, *made.get(op, ()))]
    read = {value for ops in made.values() for op in ops for value in op.inputs}
    readers: dict[Value, list[Op]] = {}
    sources: dict[Value, set[Value]] = {}  # of what is dead: the values that are not
    for op in seen:
        found = [sources.get(value, {value}) for value in op.inputs if value.data is None]
        sources[op.output] = {op.output} if op in live else set().union(*found)
        for value in op.inputs:
            readers.setdefault(value, []).append(op)
    heirs: dict[Op, dict[Op, None]] = {}
    given: dict[Op, list[Op]] = {}
    for op in reversed(seen):
        after = made[op] if op in made else readers.get(op.output, ())
        heirs[op] = {op: None} if op in live else {heir: None for each in after for heir in heirs[each]}
        if op in live or op in made or read.isdisjoint(sources[op.output]):  # the last: it was not needed
            continue
        alike = [heir for heir in heirs[op] if heir.kind == op.kind]
        for heir in alike or (() if op.kind in _PLACES else heirs[op]):
            given.setdefault(heir, []).append(op)
    for replaced, ops in made.items():
        for op in ops:
            others = given.get(op, [])
            own = [] if op.kind != replaced.kind and op.kind in {other.kind for other in others} else [op]
            op.origins = together([*own, *others])


def settle(graph: Graph, target: Target, rules: Rules) -> None:
    """Repeat ``sweep`` until no rule does anything.

    A rule must remove an operator or move one past another in the direction of all rules, which each operator can do at
    most as often as there are operators.

    Raises:
        AssertionError: the rules do not come to rest: two of them undo each other.
    """
    for _ in range(len(graph.ops) + 2):
        if not sweep(graph, target, rules):
            return
    raise AssertionError(f"rules for {', '.join(rules)} undo each other")


def _first(rules: Sequence[Rule], op: Op, rewriter: Rewriter) -> Value | None:
    for rule in rules:
        try:
            result = rule(op, rewriter)
        except Unsupported:
            continue
        if result is not None:
            return result
    return None
