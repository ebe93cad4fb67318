"""Tests of the TOSA conformance generator (tosa-tools), one flatbuffer at a time, in process.

The command line tool writes every test of a configuration entry, starts a process for each batch and runs the reference
model on all of them. Here the tests of an entry are listed and selected as it selects them, and each is written when it
is taken: the same names, the same flatbuffers, the same inputs.
"""

from __future__ import annotations

import contextlib
import copy
import io
import json
import logging
import re
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from math import prod
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from arm_backend_core.targets.target import EXTENSIONS
from arm_backend_core.tosa.operators import OPERATORS

Array = np.ndarray[Any, Any]
#: The version of TOSA that tests are made for; what only the draft of 1.1 has is made for that.
VERSIONS = ("1.0.1", "1.1.0")
_OF_THE_DRAFT = ("mxfp",)
_PROFILES = ("tosa-pro-int", "tosa-pro-fp")
_PREFIX = "tosa-ext-"
#: Operators that hold graphs: no record describes them, a pass writes them.
CONTROL_FLOW = ("COND_IF", "WHILE_LOOP")


@dataclass(frozen=True)
class Generated:
    """One test as the generator writes it.

    Attributes:
        fails: the ERROR_IF or REQUIRE statement that it breaks, or None if it is to work.
        profiles: those of which any has what is tested.
        extensions: those of which all are needed.
        inputs: arrays in the order of the graph's inputs.
    """

    name: str
    flatbuffer: bytes
    inputs: tuple[Array, ...]
    fails: str | None
    profiles: tuple[str, ...]
    extensions: tuple[str, ...]


@dataclass(frozen=True)
class Entry:
    """A configuration entry: tests of one operator that some profiles or extensions have.

    Attributes:
        operator: its name in the configuration, for example ``conv2d``.
        kind: its name in TOSA.
        group: the entry's name among those of the operator.
    """

    operator: str
    kind: str
    group: str
    version: str

    def __str__(self) -> str:
        return f"{self.operator}/{self.group}@{self.version}"


@dataclass(frozen=True)
class Listed:
    """A test that is not written yet.

    Attributes:
        elements: of its largest operand.
    """

    name: str
    fails: str | None
    elements: int
    _generator: Any
    _test: Any

    def write(self) -> Generated | None:
        """The test; None where the generator finds that its arguments make none."""
        from schemavalidation.schemavalidation import TestDescSchemaValidator

        test = self._test
        # The generator checks what it wrote against a schema, after the schema: 0.1 s each of five times a test.
        unchecked = mock.patch.object(TestDescSchemaValidator, "validate_config")
        with unchecked, tempfile.TemporaryDirectory() as folder, _silence():
            self._generator.basePath = folder
            arguments = (test.testOpName, self.name, test.dtype, test.error, test.shapeList, test.argsDict)
            if not self._generator.serializeTest(*arguments):
                return None
            return _read(Path(folder, test.testOpName, self.name), self.name, self.fails)


def _read(folder: Path, name: str, fails: str | None) -> Generated:
    from tosa_serializer.numpy_utils import load_npy

    told = json.loads((folder / "desc.json").read_text())
    assert told["expected_failure"] == (fails is not None), name
    needs, tensors = told["test_requirements"], told["meta"].get("data_gen", {"tensors": {}})["tensors"]
    inputs = []
    for tensor, file in zip(told["ifm_name"], told["ifm_file"], strict=True):
        stored = folder / file
        known = tensor in tensors
        inputs.append(load_npy(str(stored), tensors[tensor]["data_type"]) if known else np.load(stored))
    extensions = [extension.removeprefix(_PREFIX) for extension in needs.get("extensions_required", ())]
    profiles = [profile.removeprefix("tosa-pro-").upper() for profile in needs["profiles_supported"]]
    flatbuffer = (folder / told["tosa_file"]).read_bytes()
    return Generated(name, flatbuffer, tuple(inputs), fails, tuple(profiles), tuple(extensions))


@cache
def _configuration() -> tuple[Path, dict[str, Any]]:
    from conformance import tosa_verif_conformance_generator as command

    path = Path(command.__file__).with_name("cts-config_v1.0.json")
    return path, {name: entry for name, entry in json.loads(path.read_text()).items() if name != "$comment"}


@cache
def _library() -> str:
    from conformance import model_files

    model = model_files.find_tosa_file(model_files.TosaFileType.REF_MODEL, None, False)
    return str(model_files.find_tosa_file(model_files.TosaFileType.GENERATE_LIBRARY, model))


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    """The generator prints what it skips, and logs it as errors."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        logging.disable(before)


def entries() -> list[Entry]:
    """Those of every operator that the compiler writes, for the profiles and extensions that it offers."""
    kinds = {*OPERATORS, *CONTROL_FLOW}
    found = []
    for version in VERSIONS:
        offered = _offered(version)
        later = {_PREFIX + extension for extension in _OF_THE_DRAFT}
        for operator, described in sorted(_configuration()[1].items()):
            kind = operator.upper()
            if kind not in kinds or not _since(version, described):
                continue
            for group, facts in described["generation"].items():
                some, every = facts.get("supports_any", []), facts.get("supports_all", [])
                if not offered.issuperset(every) or (some and offered.isdisjoint(some)) or not _since(version, facts):
                    continue
                if version == VERSIONS[0] or later.intersection(every):
                    found.append(Entry(operator, kind, group, version))
    return found


def _offered(version: str) -> set[str]:
    extensions = [x for x in EXTENSIONS if x not in _OF_THE_DRAFT or version != VERSIONS[0]]
    return {*_PROFILES, *(_PREFIX + extension for extension in extensions)}


def _since(version: str, facts: dict[str, Any]) -> bool:
    from conformance.tosa_verif_conformance_generator import in_version
    from semver import Version

    with _silence():
        return bool(in_version(Version.parse(version), facts))


def batches(entry: Entry) -> list[list[str]]:
    """Arguments of the generator, one list for each of the entry's batches; the last makes ERROR_IF tests, if any."""
    facts = _configuration()[1][entry.operator]["generation"][entry.group]
    found = [["--test-type", "positive", *arguments] for arguments in facts["generator_args"]]
    if facts.get("no_negative_tests"):
        return found
    types: dict[str, None] = {}
    for arguments in facts["generator_args"]:
        option = ""
        for argument in arguments:
            if argument.startswith("--"):
                option = argument
            elif option == "--target-dtype":
                types[argument] = None
    negative = ["--test-type", "negative", "--tensor-dim-range", facts.get("negative_dim_range", "1,16")]
    return [*found, negative + [part for name in types for part in ("--target-dtype", name)]]


def listed(entry: Entry, arguments: Sequence[str]) -> list[Listed]:
    """The tests of one batch that the configuration selects."""
    import generator.tosa_test_select as select
    import generator.tosa_verif_build_tests as build
    from semver import Version

    path, configuration = _configuration()
    described = configuration[entry.operator]
    criteria = described["generation"][entry.group].get("selector", "default")
    offered = sorted(_offered(entry.version))
    given = ["--generate-lib-path", _library(), "--tosa-version", entry.version]
    given += ["--test-selection-config", str(path), "--test-selection-criteria", criteria]
    given += ["--profile", *_PROFILES, "--extension", *(name for name in offered if name.startswith(_PREFIX))]
    given += ["--random-const-inputs"] * ("random_const_inputs" in described.get("support_for", []))
    with _silence():
        args = build.parseArgs([*given, *arguments])
        source = _test_generator(args, Version.parse(entry.version))
        tests = select.TestList(configuration, selectionCriteria=criteria)
        pattern = re.compile(described.get("gen_filter", f"^{entry.operator}$"))
        for name in source.TOSA_OP_LIST:
            if pattern.match(source.getOperatorNameStr(name)):
                for test in _tests(source, name, args):
                    tests.add(test)
        chosen = tests.select(rng=source.testSelect_rng, profiles_chosen=args.profile, extensions_chosen=args.extension)
    return [
        Listed(str(test), test.error, max((prod(map(int, x)) for x in test.shapeList), default=0), source, test)
        for test in chosen
    ]


def _test_generator(args: Any, version: Any) -> Any:
    """With a table of operators of its own: it writes the kernels of its arguments into that of the class."""
    from generator.tosa_test_gen import TosaTestGen

    with mock.patch.object(TosaTestGen, "TOSA_OP_LIST", copy.deepcopy(TosaTestGen.TOSA_OP_LIST)):
        source = TosaTestGen(args, version)
        source.TOSA_OP_LIST = TosaTestGen.TOSA_OP_LIST
    return source


def _tests(source: Any, name: Any, args: Any) -> Iterator[Any]:
    from generator.tosa_test_select import Test

    filters = {"shapeFilter": args.target_shapes, "rankFilter": args.target_ranks, "dtypeFilter": args.target_dtypes}
    for op, text, dtype, error, shapes, facts in source.genOpTestList(name, **filters, testType=args.test_type):
        yield Test(source.getOperatorNameStr(op), text, dtype, error, shapes, facts, op)
