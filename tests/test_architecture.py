"""Limits on the source: length of functions and modules, nesting, direction of imports."""

from __future__ import annotations

import ast
import io
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

from arm_backend_core.alternatives.alternatives_pass import ALTERNATIVES
from arm_backend_core.aten import complex_numbers, higher_order
from arm_backend_core.ops.catalog import all_entries
from arm_backend_core.tosa.vela_workarounds.catalog import WORKAROUNDS
from tests import import_graph
from tests.import_graph import CORE, LAYERS, RECIPES, ROOT, list_imports, list_sources, module_name, parse

PACKAGES = (CORE, RECIPES)

MAX_FUNCTION_LINES = 60
"""Maximum lines of a function without its docstring."""

MAX_NESTING = 4
"""Maximum number of nested blocks in a function; ``elif`` opens none."""

MAX_MODULE_LINES = 400
"""Maximum lines of a module."""

OPERATOR_PACKAGES = ("ops", "aten", "tosa", "lowering")
"""Parts of the core that grow with the number of operators; workarounds for Vela, in ``tosa``, do not."""

CODE_LINES_PER_OPERATOR = 25.7
"""Maximum code lines of ``OPERATOR_PACKAGES`` per ATen overload with a record, a complex rule or subgraph; today 24.5.

Code lines are lines without blank lines, comments and docstrings: a limit of all lines would reward short explanations.
This limit and the following ones leave a margin of 5%: without one, they would reward code golf."""

CODE_LINES_PER_ALTERNATIVE = 63.2
"""Maximum code lines of ``alternatives`` per alternative, with the cost model and the chooser; today 60.1.

They are counted separately: an alternative saves cycles, and no operator needs it."""

CODE_LINES_PER_WORKAROUND = 25.1
"""Maximum code lines of the workarounds per bug of Vela that they avoid; today 23.9.

They are counted separately: their number grows with Vela's bugs, not with the operators."""

RECURSIVE_WALKS = {
    "_value_bounds": "has a maximum depth",
    "_find_base": "visits each value once, and has a maximum number of values",
    "feeds": "follows operators with one operand: one path leads to each",
    "is_permuted": "follows operators with one operand: one path leads to each",
    "_is_widened_again": "follows operators with one operand: one path leads to each",
    "_find_reading_layers": "follows operators with one operand: one path leads to each",
    "readers_past_views": "follows operators with one operand: one path leads to each",
    "_is_aliased": "follows views, which have one source",
    "_is_read_after": "follows views, which have one source",
}
"""Recursive functions over neighbours in a graph, and why the number of paths is not exponential.

Other walks visit each node once (``nodes.readers_through``). In a chain of 30 CONCATs, each of two slices of the one
before, there are 2**30 paths.
"""

_NEIGHBOURS = {"users", "all_input_nodes", "inputs", "readers"}
_BLOCKS = (ast.If, ast.For, ast.While, ast.With, ast.Try, ast.Match)
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_WITHOUT_CODE = {
    *(tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT),
    *(tokenize.ENCODING, tokenize.ENDMARKER),
}


def _functions(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    return (node for node in ast.walk(tree) if isinstance(node, _FUNCTIONS))


def _count_lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    first = min([function.lineno, *(decorator.lineno for decorator in function.decorator_list)])
    total = (function.end_lineno or first) - first + 1
    if ast.get_docstring(function, clean=False) is None:
        return total
    docstring = function.body[0]
    return total - ((docstring.end_lineno or 0) - docstring.lineno + 1)


def _measure_nesting(node: ast.AST, depth: int = 0) -> int:
    """Return the depth of nested blocks of a function, without those of its inner functions."""
    deepest = depth
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (*_FUNCTIONS, ast.ClassDef)):
            continue
        is_elif = isinstance(node, ast.If) and isinstance(child, ast.If) and node.orelse == [child]
        deepest = max(deepest, _measure_nesting(child, depth + (isinstance(child, _BLOCKS) and not is_elif)))
    return deepest


def test_functions_can_be_read_without_scrolling() -> None:
    long, deep = [], []
    for path in [path for package in PACKAGES for path in list_sources(package)]:
        for function in _functions(parse(path)):
            where = f"{path.relative_to(ROOT)}:{function.lineno} {function.name}"
            if (lines := _count_lines(function)) > MAX_FUNCTION_LINES:
                long.append(f"{where}: {lines} lines")
            if (levels := _measure_nesting(function)) > MAX_NESTING:
                deep.append(f"{where}: {levels} levels")
    assert long + deep == []


def test_modules_are_short() -> None:
    lines = {module_name(path): _total_lines(str(path)) for package in PACKAGES for path in list_sources(package)}
    too_long = {module: count for module, count in lines.items() if count > MAX_MODULE_LINES}
    assert too_long == {}


def _recurses_into_neighbours(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Whether a function calls itself for each of several neighbours."""
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


def test_only_listed_graph_walks_are_recursive() -> None:
    found = {
        function.name
        for package in PACKAGES
        for path in list_sources(package)
        for function in _functions(parse(path))
        if _recurses_into_neighbours(function)
    }
    assert found == RECURSIVE_WALKS.keys()


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
    assert _measure_nesting(function) == expected


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


def test_import_cycles_and_upward_imports_are_detected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_the_core_does_not_import_the_recipes() -> None:
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
        for name in list_imports(path) | _string_constants(path)
        if f"{name}.".startswith(f"{peer}.")
    ]
    assert importing == []


def _string_constants(path: Path) -> set[str]:
    """String constants of a file; one of them may be the module of a late import."""
    nodes = ast.walk(parse(path))
    return {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}


def test_kinds_of_dtypes_are_queried_by_kind_of() -> None:
    """A dtype that is not floating point may be integer, boolean or complex; ``scalar_kind`` distinguishes them.

    Decompositions, which PyTorch traces, use its own methods.
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
    assert not found, f"ask arm_backend_core.scalar_kind: {sorted(found)}"


def test_code_lines_per_operator() -> None:
    lines = sum(_count_code_lines(f"{CORE}/{name}") for name in OPERATOR_PACKAGES)
    lines -= _count_code_lines(f"{CORE}/tosa/vela_workarounds")
    operators = all_entries().keys() | complex_numbers.COMPLEX_DECOMPOSITIONS.keys() | higher_order.INLINE_RULES.keys()
    assert lines / len(operators) <= CODE_LINES_PER_OPERATOR, f"{lines} lines, {len(operators)} operators"


def test_code_lines_per_alternative() -> None:
    unconditional, goals = 7, 1  # rewrites of ``apply_unconditional``; ``size_or_speed`` for whole programs
    count = len(ALTERNATIVES) + unconditional + goals
    lines = _count_code_lines(f"{CORE}/alternatives")
    assert lines / count <= CODE_LINES_PER_ALTERNATIVE, f"{lines} lines, {count} alternatives"


def test_code_lines_per_workaround() -> None:
    lines = _count_code_lines(f"{CORE}/tosa/vela_workarounds")
    assert lines / len(WORKAROUNDS) <= CODE_LINES_PER_WORKAROUND, f"{lines} lines, {len(WORKAROUNDS)} workarounds"


def test_code_lines_are_those_without_docstrings_and_comments() -> None:
    lines = (
        *(
            '"""Module."""',
            "",
            'X = """a',
            'b"""  # two lines',
            "",
            "def f() -> None:",
            '    """Function.',
            "",
            "    More.",
        ),
        *('    """', "    # why", "    g(", "        1,", "    )"),
    )
    text = "\n".join(lines)
    assert len(_code_lines(ast.parse(text), text)) == 6


def _count_code_lines(package: str) -> int:
    return sum(len(_code_lines(parse(path), path.read_text())) for path in list_sources(package))


def _code_lines(tree: ast.Module, text: str) -> set[int]:
    """Return the numbers of all lines but blank lines, comments and docstrings."""
    lines = {
        number
        for token in tokenize.generate_tokens(io.StringIO(text).readline)
        if token.type not in _WITHOUT_CODE
        for number in range(token.start[0], token.end[0] + 1)
    }
    for node in ast.walk(tree):
        if (
            isinstance(node, (ast.Module, ast.ClassDef, *_FUNCTIONS))
            and ast.get_docstring(node, clean=False) is not None
        ):
            lines -= set(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    return lines


def _total_lines(package: str) -> int:
    return sum(len(path.read_text().splitlines()) for path in list_sources(package))
