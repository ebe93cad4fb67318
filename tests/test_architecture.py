"""What can be read off the source: size, nesting, the direction of imports."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from arm_backend_core.alternatives.chooser import ALTERNATIVES
from arm_backend_core.aten import complex_numbers, higher_order
from arm_backend_core.ops.catalog import all_records
from arm_backend_core.tosa.vela_workarounds.catalog import WORKAROUNDS
from tests import import_graph
from tests.import_graph import CORE, LAYERS, RECIPES, ROOT, list_imports, list_sources, module_name, parse

PACKAGES = (CORE, RECIPES)

LINES = 60
"""Most lines of a function, its docstring aside."""

NESTING = 4
"""Most statements with a body of their own around a line of a function; ``elif`` opens none."""

MODULE_LINES = 400
"""Most lines of a module."""

NEEDED_BY_OPERATORS = ("ops", "aten", "tosa", "lowering")
"""Parts of the core that grow with the number of operators; workarounds for Vela, in ``tosa``, do not."""

LINES_PER_OPERATOR = 36.3
"""Most lines of these for each ATen overload that has a record, a rule for complex numbers, or a graph inside.

Today's average is 34.6: 31.3 before tables were fitted and magnitudes, norms and gains of channels had rules of their
own. A gate at its limit would reward golf, so it leaves 5% of air."""

LINES_PER_ALTERNATIVE = 105
"""Most lines of ``alternatives`` for each of them, cost model and choice included; today 96.

They are counted apart: an alternative is there for what it saves, whatever the number of operators; none is needed."""

LINES_PER_WORKAROUND = 43
"""Most lines of the workarounds for each of Vela's bugs that they avoid; today 41.2.

They are counted apart: their number grows with Vela's bugs, not with the operators."""

ONE_WAY = {
    "_value_bounds": "it ends at a depth",
    "feeds": "of operators with one operand, by which one path leads to each",
    "is_permuted": "of operators with one operand, by which one path leads to each",
    "_is_widened_again": "of operators with one operand, by which one path leads to each",
    "_find_reading_layers": "of operators with one operand, by which one path leads to each",
    "readers_past_views": "of operators with one operand, by which one path leads to each",
    "_is_aliased": "a view has one source",
    "_is_read_after": "a view has one source",
}
"""Functions that call themselves for each neighbour in a graph, and why there are not exponentially many paths.

Others visit each node once (``nodes.readers_through``): 30 CONCATs of two parts of the one before are 2**30 paths.
"""

_NEIGHBOURS = {"users", "all_input_nodes", "inputs", "readers"}
_BLOCKS = (ast.If, ast.For, ast.While, ast.With, ast.Try, ast.Match)
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def _functions(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    return (node for node in ast.walk(tree) if isinstance(node, _FUNCTIONS))


def _lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    first = min([function.lineno, *(decorator.lineno for decorator in function.decorator_list)])
    total = (function.end_lineno or first) - first + 1
    if ast.get_docstring(function, clean=False) is None:
        return total
    docstring = function.body[0]
    return total - ((docstring.end_lineno or 0) - docstring.lineno + 1)


def _nesting(node: ast.AST, depth: int = 0) -> int:
    """How many blocks are around the innermost statement of a function, those of functions inside it aside."""
    deepest = depth
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (*_FUNCTIONS, ast.ClassDef)):
            continue
        is_elif = isinstance(node, ast.If) and isinstance(child, ast.If) and node.orelse == [child]
        deepest = max(deepest, _nesting(child, depth + (isinstance(child, _BLOCKS) and not is_elif)))
    return deepest


def test_functions_can_be_read_without_scrolling() -> None:
    long, deep = [], []
    for path in [path for package in PACKAGES for path in list_sources(package)]:
        for function in _functions(parse(path)):
            where = f"{path.relative_to(ROOT)}:{function.lineno} {function.name}"
            if (lines := _lines(function)) > LINES:
                long.append(f"{where}: {lines} lines")
            if (levels := _nesting(function)) > NESTING:
                deep.append(f"{where}: {levels} levels")
    assert long + deep == []


def test_modules_are_short() -> None:
    lines = {module_name(path): _total_lines(str(path)) for package in PACKAGES for path in list_sources(package)}
    too_long = {module: count for module, count in lines.items() if count > MODULE_LINES}
    assert too_long == {}


def _branches(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Whether it calls itself for each of several neighbours."""
    loops: list[tuple[ast.expr, ast.AST]] = []
    for node in ast.walk(function):
        if isinstance(node, ast.For):
            loops.append((node.iter, node))
        elif isinstance(node, (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)):
            loops += [(generator.iter, node) for generator in node.generators]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "map":
            called = ast.Call(node.args[0], [], [])
            loops.append((node.args[1], called))
    return any(
        _NEIGHBOURS & _names(over)
        and isinstance(node, ast.Call)
        and ast.unparse(node.func).split(".")[-1] == function.name
        for over, body in loops
        for node in ast.walk(body)
    )


def _names(tree: ast.AST) -> set[str]:
    names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    return names | {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}


def test_walks_visit_a_node_once() -> None:
    found = {
        function.name
        for package in PACKAGES
        for path in list_sources(package)
        for function in _functions(parse(path))
        if _branches(function)
    }
    assert found == ONE_WAY.keys()


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("def f():\n  return 1", 0),
        ("def f():\n  if a:\n    pass\n  elif b:\n    pass\n  else:\n    pass", 1),
        ("def f():\n  if a:\n    pass\n  else:\n    x = 1\n    if b:\n      pass", 2),
        ("def f():\n for a in b:\n  with c:\n   try:\n    d\n   except E:\n    while d:\n     e", 4),
        ("def f():\n  if a:\n    def g():\n      if b:\n        pass", 1),
    ],
)
def test_nesting_is_counted_in_blocks(source: str, expected: int) -> None:
    (function, *_) = _functions(ast.parse(source))
    assert _nesting(function) == expected


@pytest.mark.parametrize("package", PACKAGES)
def test_every_module_has_a_layer(package: str) -> None:
    placed = [name for layer in LAYERS[package] for name in layer]
    assert len(placed) == len(set(placed))
    units = {import_graph.layer_entry(module) for module in import_graph.package_imports(package)}
    assert units <= set(placed), "name its layer in tests/import_graph.py"


@pytest.mark.parametrize("package", PACKAGES)
def test_no_import_leads_upwards(package: str) -> None:
    assert list(import_graph.find_upward_imports(package)) == []


@pytest.mark.parametrize("package", PACKAGES)
def test_no_modules_import_each_other(package: str) -> None:
    assert import_graph.find_cycles(package) == []


def test_circles_and_upward_imports_are_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / CORE
    package.mkdir()
    (package / "dtype.py").write_text("def f() -> None:\n    import arm_backend_core.delegate\n")
    (package / "delegate.py").write_text(
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from arm_backend_core.dtype import f\n"
    )
    assert import_graph.find_cycles(CORE, tmp_path) == [["arm_backend_core.delegate", "arm_backend_core.dtype"]]
    assert list(import_graph.find_upward_imports(CORE, tmp_path)) == [
        "arm_backend_core.dtype imports arm_backend_core.delegate"
    ]
    assert import_graph.count_imports_in_functions(CORE, tmp_path) == 1


def test_the_core_knows_nothing_of_recipes() -> None:
    importing = [
        module_name(path)
        for path in list_sources(CORE)
        for name in list_imports(path)
        if name.startswith("arm_recipes")
    ]
    assert importing == []


def test_no_import_of_executorchs_arm_backend() -> None:
    peer = "executorch.backends.arm"
    importing = [
        module_name(path)
        for package in PACKAGES
        for path in list_sources(package)
        for name in list_imports(path) | _texts(path)
        if f"{name}.".startswith(f"{peer}.")
    ]
    assert importing == []


def _texts(path: Path) -> set[str]:
    """String constants of a file: a late import may give a module's name as one."""
    nodes = ast.walk(parse(path))
    return {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}


def test_kinds_of_numbers_are_asked_for_by_name() -> None:
    """What is no floating-point number may be an integer, a boolean or complex: ``kinds`` tells, for all.

    Functions of tensors, which are traced, ask PyTorch's own methods.
    """
    asks = {"is_floating_point", "is_complex"}
    found = {
        f"{module_name(path)}:{node.lineno}"
        for package in PACKAGES
        for path in list_sources(package)
        if "composites" not in path.parts
        for node in ast.walk(parse(path))
        if isinstance(node, ast.Attribute) and node.attr in asks
    }
    assert not found, f"ask arm_backend_core.kinds: {sorted(found)}"


def test_lines_per_operator() -> None:
    lines = sum(_total_lines(f"{CORE}/{name}") for name in NEEDED_BY_OPERATORS)
    lines -= _total_lines(f"{CORE}/tosa/vela_workarounds")
    operators = all_records().keys() | complex_numbers.RULES.keys() | higher_order.INLINE_RULES.keys()
    assert lines / len(operators) <= LINES_PER_OPERATOR, f"{lines} lines, {len(operators)} operators"


def test_lines_per_alternative() -> None:
    unconditional, goals = 5, 1  # rewrites of ``apply_unconditional``; ``size_or_speed``, which is of whole programs
    assert _total_lines(f"{CORE}/alternatives") / (len(ALTERNATIVES) + unconditional + goals) <= LINES_PER_ALTERNATIVE


def test_lines_per_workaround() -> None:
    assert _total_lines(f"{CORE}/tosa/vela_workarounds") / len(WORKAROUNDS) <= LINES_PER_WORKAROUND


def _total_lines(package: str) -> int:
    return sum(len(path.read_text().splitlines()) for path in list_sources(package))
