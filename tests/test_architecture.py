"""What can be read off the source: size, nesting, the direction of imports."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from arm_backend_core.aten import complex_numbers, conditions
from arm_backend_core.forms.chooser import FORMS
from arm_backend_core.ops.registry import every_record
from arm_backend_core.tosa.passes.vela import MISTAKES

ROOT = Path(__file__).resolve().parents[1]
CORE = "arm_backend_core"

LINES = 60
"""Most lines of a function of the core, decorators and docstring included."""

NESTING = 4
"""Most statements with a body of their own around a line of a function; ``elif`` opens none."""

LINES_PER_OPERATOR = 40
"""Most lines of the core for each ATen overload that has a record, a rule for complex numbers, or a graph inside."""

LINES_PER_FORM = 100
"""Most lines of ``forms`` for each form, what they are priced and chosen with included.

They are counted apart: a form is there for what it saves, whatever the number of operators; none is needed."""

LINES_PER_WORKAROUND = 40
"""Most lines of the workarounds for each mistake of Vela that they avoid.

They are counted apart: their number grows with Vela's mistakes, not with the operators."""

WORKAROUNDS = ("mistakes", "vela", "vela_numbers", "vela_rescales", "vela_shapes", "vela_tables")
"""Modules of ``tosa/passes`` that hold them."""

LAYERS = (
    {"errors", "dtype", "kinds", "permutation", "qparams", "nodes", "workers"},
    {"targets"},
    {"tosa"},
    {"ops", "backends"},
    {"aten", "forms", "fusion", "events", "program", "splice"},
    {"quantizer", "lowering", "culprit"},
    {"selection"},
    {"delegate"},
    {"partitioner"},
)
"""Modules and packages of the core, the lowest first. An import leads to the same layer or a lower one, wherever it
stands: in a function and under ``TYPE_CHECKING`` too."""

AGAINST = {
    ("ops.registry", "ops.families"): "whoever asks for a record first loads the families, which register themselves",
}
"""Imports that lead upwards or back all the same: (importing module, imported module or its package) -> why."""

ONE_WAY = {
    "_range": "it ends at a depth",
    "feeds": "of operators with one operand, by which one path leads to each",
    "turned": "of operators with one operand, by which one path leads to each",
    "_widened": "of operators with one operand, by which one path leads to each",
    "_readers": "of operators with one operand, by which one path leads to each",
    "_is_shared": "a view has one source",
    "_read_after": "a view has one source",
}
"""Functions that call themselves for each neighbour in a graph, and why there are not exponentially many paths.

Others visit each node once (``nodes.readers_through``): 30 CONCATs of two parts of the one before are 2**30 paths.
"""

_NEIGHBOURS = {"users", "all_input_nodes", "inputs", "readers"}
_BLOCKS = (ast.If, ast.For, ast.While, ast.With, ast.Try, ast.Match)
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def _sources(package: str) -> list[Path]:
    path = ROOT / package
    return [path] if path.suffix else sorted(path.rglob("*.py"))


@cache
def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def _module(path: Path) -> str:
    """Dotted name of a file below the root; a package's is that of its folder."""
    name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
    return name.removesuffix(".__init__")


def _functions(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    return (node for node in ast.walk(tree) if isinstance(node, _FUNCTIONS))


def _lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    first = min([function.lineno, *(decorator.lineno for decorator in function.decorator_list)])
    return (function.end_lineno or first) - first + 1


def _nesting(node: ast.AST, depth: int = 0) -> int:
    """How many blocks are around the innermost statement of a function, those of functions inside it aside."""
    deepest = depth
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (*_FUNCTIONS, ast.ClassDef)):
            continue
        is_elif = isinstance(node, ast.If) and isinstance(child, ast.If) and node.orelse == [child]
        deepest = max(deepest, _nesting(child, depth + (isinstance(child, _BLOCKS) and not is_elif)))
    return deepest


def _imports(path: Path) -> set[str]:
    """Names of the modules that a file imports, wherever the import stands; what is no module is left out."""
    found: set[str] = set()
    for node in ast.walk(_tree(path)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.module, f"{path}:{node.lineno}: imports are absolute"
            assert node.level == 0, f"{path}:{node.lineno}: imports are absolute"
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            modules = {name for name in names if _is_module(name)}
            found |= modules if modules == names else modules | {node.module}
    return found


def _is_module(name: str) -> bool:
    path = ROOT.joinpath(*name.split("."))
    return path.is_dir() or path.with_suffix(".py").exists()


def _core_imports() -> dict[str, set[str]]:
    """Modules of the core with the modules of the core that each imports, names without the package's."""
    prefix = f"{CORE}."
    return {
        _module(path).removeprefix(prefix): {
            name.removeprefix(prefix) for name in _imports(path) if name.startswith(prefix)
        }
        for path in _sources(CORE)
    }


def _unit(module: str) -> str:
    return module.split(".")[0]


def test_functions_can_be_read_without_scrolling() -> None:
    long, deep = [], []
    for path in _sources(CORE):
        for function in _functions(_tree(path)):
            where = f"{path.relative_to(ROOT)}:{function.lineno} {function.name}"
            if (lines := _lines(function)) > LINES:
                long.append(f"{where}: {lines} lines")
            if (levels := _nesting(function)) > NESTING:
                deep.append(f"{where}: {levels} levels")
    assert long + deep == []


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
        for package in (CORE, "arm_recipes")
        for path in _sources(package)
        for function in _functions(_tree(path))
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


def test_every_module_has_a_layer() -> None:
    placed = [unit for layer in LAYERS for unit in layer]
    assert len(placed) == len(set(placed))
    assert {_unit(module) for module in _core_imports()} - {CORE} <= set(placed), "name its layer in LAYERS"


def _regular_imports() -> dict[str, set[str]]:
    """The imports of the core's modules without those in ``AGAINST``."""
    return {
        module: {name for name in names if not {(module, name), (module, _unit(name))} & AGAINST.keys()}
        for module, names in _core_imports().items()
    }


def test_no_import_leads_upwards() -> None:
    rank = {unit: i for i, layer in enumerate(LAYERS) for unit in layer}
    found = [
        f"{module} imports {name}"
        for module, names in _regular_imports().items()
        for name in names
        if module != CORE and rank[_unit(name)] > rank[_unit(module)]
    ]
    assert found == []


def test_no_import_leads_back() -> None:
    assert list(TopologicalSorter(_regular_imports()).static_order())  # CycleError names the circle


def test_the_core_knows_nothing_of_recipes() -> None:
    importing = [_module(path) for path in _sources(CORE) for name in _imports(path) if name.startswith("arm_recipes")]
    assert importing == []


def test_no_import_of_executorchs_arm_backend() -> None:
    peer = "executorch.backends.arm"
    importing = [
        _module(path)
        for package in (CORE, "arm_recipes")
        for path in _sources(package)
        for name in _imports(path) | _texts(path)
        if f"{name}.".startswith(f"{peer}.")
    ]
    assert importing == []


def _texts(path: Path) -> set[str]:
    """String constants of a file: a late import may give a module's name as one."""
    nodes = ast.walk(_tree(path))
    return {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}


def test_kinds_of_numbers_are_asked_for_by_name() -> None:
    """What is no floating-point number may be an integer, a boolean or complex: ``kinds`` tells, for all.

    Functions of tensors, which are traced, ask PyTorch's own methods.
    """
    asks = {"is_floating_point", "is_complex"}
    found = {
        f"{_module(path)}:{node.lineno}"
        for package in (CORE, "arm_recipes")
        for path in _sources(package)
        if "composites" not in path.parts
        for node in ast.walk(_tree(path))
        if isinstance(node, ast.Attribute) and node.attr in asks
    }
    assert not found, f"ask arm_backend_core.kinds: {sorted(found)}"


def test_lines_per_operator() -> None:
    lines = _total_lines(CORE) - _total_lines(f"{CORE}/forms") - _workaround_lines()
    operators = every_record().keys() | complex_numbers.RULES.keys() | conditions.BODY.keys()
    assert lines / len(operators) <= LINES_PER_OPERATOR, f"{lines} lines, {len(operators)} operators"


def test_lines_per_form() -> None:
    always, goals = 5, 1  # those of ``take_always``, which are not chosen, and what is of whole programs
    assert _total_lines(f"{CORE}/forms") / (len(FORMS) + always + goals) <= LINES_PER_FORM


def test_lines_per_workaround() -> None:
    assert _workaround_lines() / len(MISTAKES) <= LINES_PER_WORKAROUND


def _workaround_lines() -> int:
    return sum(_total_lines(f"{CORE}/tosa/passes/{name}.py") for name in WORKAROUNDS)


def _total_lines(package: str) -> int:
    return sum(len(path.read_text().splitlines()) for path in _sources(package))
