"""The sweep that local rules run in: one walk over the graph that offers each operator to its rules."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

from arm_backend_core.errors import Unsupported
from arm_backend_core.targets.target import Target
from arm_backend_core.tosa.builder import Builder
from arm_backend_core.tosa.graph import Graph, Op, Value, merge_origins


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
        return self.only_user(value) is not None

    def only_user(self, value: Value) -> Op | None:
        """The operator that reads ``value``, where no other does and that is known."""
        match self.users(value):
            case [reader]:
                return reader
        return None

    def feeds(self, value: Value, kind: str, through: Sequence[str] = ("RESHAPE", "RESCALE")) -> bool:
        """Whether a ``kind`` reads the value, as it is or past operators of the kinds ``through``."""
        readers = self.users(value) or []
        return any(r.kind == kind or (r.kind in through and self.feeds(r.output, kind, through)) for r in readers)

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


def skip_through(value: Value, *kinds: str) -> Value:
    """What ``value`` is, before operators of these kinds."""
    while (op := value.producer) is not None and op.kind in kinds:
        value = op.inputs[0]
    return value


def apply_once(graph: Graph, target: Target, rules: Rules, *, anew: bool = False) -> bool:
    """Offer every operator, in execution order, to ``rules[kind]``; True if anything was replaced.

    What a rule wrote before it gave None, or before the target refused an operator, is dead and removed.

    Args:
        anew: rules write the same operators otherwise, on other elements; they exchange none.
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
        _propagate_origins(made, set(graph.ops), anew)
    return bool(replaced)


#: What costs nothing any more where arithmetic takes it in.
_PLACES = ("IDENTITY", "RESHAPE", "TRANSPOSE")


def _propagate_origins(made: Mapping[Op, Sequence[Op]], live: Collection[Op], anew: bool) -> None:
    """What died for others gives its origins to what stands for them: to those of its kind, or else to all.

    What a rule writes has the origins of the operator that it is for; where it stands for others of its own kind, only
    theirs: f(TRANSPOSE(x)) becomes TRANSPOSE(f(x)), and both keep what they have. No arithmetic loses its origins.

    Args:
        made: by the operators that were replaced, in execution order, what was written for each.
        anew: f(TRANSPOSE(x)) is never what was written so; it would have a value that it has not.
    """
    for replaced, ops in made.items():
        given: dict[Op, list[Op]] = {}
        for gone in _between({value for op in ops for value in op.inputs}, replaced, live):
            alike = [op for op in ops if op.kind == gone.kind]
            for heir in alike or (() if gone.kind in _PLACES else ops):
                given.setdefault(heir, []).append(gone)
        for heir, others in given.items():
            exchanged = not anew and replaced.kind in {op.kind for op in ops}
            moved = exchanged and heir.kind != replaced.kind and heir.kind in {other.kind for other in others}
            heir.origins = merge_origins(others if moved else [heir, *others])


def _between(read: Collection[Value], replaced: Op, live: Collection[Op]) -> list[Op]:
    """Dead operators that lead from values that are ``read`` now to the one that was replaced."""
    found: dict[Op, None] = {}
    waiting = list(replaced.inputs)
    while waiting:
        value = waiting.pop()
        if value not in read and (op := value.producer) is not None and op not in live and op not in found:
            found[op] = None
            waiting += op.inputs
    reached, known = set(read), -1
    while len(reached) > known:
        known = len(reached)
        reached |= {op.output for op in found if not reached.isdisjoint(op.inputs)}
    return [op for op in found if op.output in reached]


def rewrite_to_fixpoint(graph: Graph, target: Target, rules: Rules) -> None:
    """Repeat ``apply_once`` until no rule does anything.

    A rule must remove an operator or move one past another in the direction of all rules, which each operator can do at
    most as often as there are operators.

    Raises:
        AssertionError: the rules do not come to rest: two of them undo each other.
    """
    for _ in range(len(graph.ops) + 2):
        if not apply_once(graph, target, rules):
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
