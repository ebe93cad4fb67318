"""Data files (``.ptd``): read in Python and in C++; missing, damaged, or of another export."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import arm_recipes
from arm_recipes import ArmRecipeType, ExportRecipe, ExportResult, RunError, load
from arm_recipes.runtime.data_file import external_data_keys, read_data_file
from arm_recipes.runtime.payload_parts import content_key, matches_key
from arm_recipes.runtime.pte import ProgramError
from tests.runtime.cpp_build import (
    RUNTIME,
    SANITIZERS,
    compile_cpp,
    executorch_include_flags,
    executorch_link_flags,
    run,
)
from tests.runtime.host_programs import export_small
from tests.small_models import images

U85 = ArmRecipeType.ETHOSU_U85_INT8


def _result(external: bool | tuple[str, ...] = True) -> ExportResult:
    return export_small(U85, external=external)


def _data_file() -> bytes:
    data = _result().data_file
    assert data is not None
    return data


def test_read_data_file_agrees_with_executorchs_reader() -> None:
    from executorch.extension.flat_tensor.serialize.serialize import FlatTensorSerializer

    expected = FlatTensorSerializer().deserialize(_data_file())
    seen = read_data_file(_data_file())
    assert {key: bytes(view) for key, view in seen.items()} == {
        key: bytes(expected.buffers[entry.buffer_index]) for key, entry in expected.named_data.items()
    }
    assert all(matches_key(key, view) for key, view in seen.items())
    assert sorted(seen) == sorted(external_data_keys(arm_recipes.runtime.pte.read_program(_result().buffer)))


def test_cpp_reader_agrees_and_never_reads_beyond_the_file(tmp_path: Path) -> None:
    (tmp_path / "model.ptd").write_bytes(_data_file())
    flags = [*executorch_include_flags(), *SANITIZERS]
    program = compile_cpp(
        tmp_path / "reader", [RUNTIME / "tests/firmware/data_file_test.cpp"], flags, link=executorch_link_flags()
    )
    printed = run([str(program), str(tmp_path / "model.ptd")])
    assert {line.split()[0]: int(line.split()[1]) for line in printed.splitlines() if line.startswith("arm_")} == {
        key: len(view) for key, view in read_data_file(_data_file()).items()
    }


def test_program_with_data_file_gives_the_results_of_the_inline_program(tmp_path: Path) -> None:
    ((x,), *_) = images()
    inline = export_small(U85)
    expected = inline.run(x)
    for external in (True, ("weights",), ("commands",)):
        result = _result(external)
        assert torch.equal(result.run(x), expected)
        path = result.save(tmp_path / "model.pte", reference=True)
        program = load(path)
        assert torch.equal(program.run(x), expected)
        assert torch.equal(program.run(x, backend="tosa"), expected)
        assert len(list(program.trace(x))) == len(list(inline.trace(x)))
        assert torch.equal(load(path.read_bytes(), tmp_path / "model.ptd").run(x), expected)
    assert inline.data_file is None


def test_external_blocks_move_bytes_from_program_to_data_file() -> None:
    inline, outside = export_small(U85).report, _result().report
    (before,), (after,) = inline.delegates, outside.delegates
    assert sum(outside.external_blocks.values()) > 0.8 * before.payload_bytes - after.payload_bytes
    assert after.payload_bytes + sum(outside.external_blocks.values()) >= before.payload_bytes
    assert outside.to_dict()["external_blocks"] == outside.external_blocks
    assert "weights in the .ptd" in str(outside)
    assert "in the .ptd" not in str(inline)
    assert _result().stored_bytes == outside.program_bytes + len(_data_file())
    assert outside.to_dict()["data_file_bytes"] == outside.data_file_bytes == len(_data_file())
    assert inline.data_file_bytes == 0


def test_missing_other_or_damaged_data_file_is_refused() -> None:
    program, data = _result().buffer, _data_file()
    with pytest.raises(RunError, match=r"needs a data file .* pass it as ptd="):
        load(program)
    other = export_small(ArmRecipeType.ETHOSU_U55_INT8, external=True).data_file
    assert other is not None
    with pytest.raises(RunError, match="belongs to another program or another export: the checksums"):
        load(program, other)
    content = bytes(next(iter(read_data_file(data).values())))
    at = data.index(content)
    with pytest.raises(RunError, match="is damaged: the SHA-256"):
        load(program, data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])


@pytest.mark.parametrize("data", [b"", b"not a file of this kind" * 9, b"\0\0\0\0FT01" + bytes(100)])
def test_bytes_that_are_no_data_file_are_refused(data: bytes) -> None:
    with pytest.raises(ProgramError, match=r"not a data file|damaged"):
        load(_result().buffer, data)


def test_truncated_data_file_is_refused() -> None:
    program, data = _result().buffer, _data_file()
    for length in range(0, len(data) - 128, 97):
        with pytest.raises((ProgramError, RunError)):
            load(program, data[:length])


def test_a_program_without_external_blocks_ignores_a_data_file() -> None:
    ((x,), *_) = images()
    inline = export_small(U85)
    assert torch.equal(load(inline.buffer, b"anything").run(x), inline.run(x))


def test_keys_of_other_exporters_match_all_data() -> None:
    assert matches_key("0" * 64, b"data")
    assert not matches_key(content_key(b"data"), b"other")


def test_invalid_values_of_external_are_refused() -> None:
    for value, message in (("weights", r"external=\['weights'\]"), (["heads"], "no block 'heads'"), (1, "neither")):
        with pytest.raises(ValueError, match=message):
            ExportRecipe.get_recipe(U85, external=value)
