"""Output folder: it is empty or of an earlier export, and errors are raised before any write."""

from __future__ import annotations

import json
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from executorch.export import ExportRecipe
from torch import Tensor, nn

from arm_backend_core.alternatives.disk_cache import write_atomically
from arm_recipes import ArmRecipeType, export, save_firmware
from arm_recipes.firmware.folder import MANIFEST, check_output_folder, write_output_folder
from tests.firmware.programs import program
from tests.runtime.host_programs import export_small, remove_checksums
from tests.small_models import Small, images

pytestmark = pytest.mark.xdist_group("firmware")


def _names(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def test_files_of_an_earlier_call_are_replaced(tmp_path: Path) -> None:
    folder = check_output_folder(tmp_path / "made")
    write_output_folder(folder, {"a": b"1", "deep/er/b": b"2", "deep/c": b"3"}, {"name": "first"})
    assert _names(folder) == {"a", "deep/er/b", "deep/c", MANIFEST}
    write_output_folder(check_output_folder(folder), {"a": b"4", "deep/c": b"3"}, {"name": "second"})
    assert _names(folder) == {"a", "deep/c", MANIFEST}
    assert (folder / "a").read_bytes() == b"4"
    assert not (folder / "deep/er").exists()
    write_output_folder(check_output_folder(folder), {"a": b"4"}, {})
    assert not (folder / "deep").exists()


def test_an_interrupted_write_can_be_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = check_output_folder(tmp_path / "made")
    write_output_folder(folder, {"a": b"1", "b": b"1"}, {})
    real = Path.mkdir

    def fail(path: Path, *arguments: object, **options: object) -> None:
        if path.name == "deep":
            raise OSError("no space")
        real(path, *arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(Path, "mkdir", fail)
    with pytest.raises(OSError, match="no space"):
        write_output_folder(check_output_folder(folder), {"a": b"2", "deep/b": b"2"}, {})
    monkeypatch.undo()
    write_output_folder(check_output_folder(folder), {"a": b"2", "deep/b": b"2"}, {})
    assert _names(folder) == {"a", "deep/b", MANIFEST}


@pytest.mark.parametrize("completed", [0, 1, 2])
def test_a_write_that_stops_while_it_replaces_files_can_be_repeated(
    completed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = check_output_folder(tmp_path / "made")
    write_output_folder(folder, {"a": b"1", "b": b"1", "old": b"1"}, {})
    real = Path.replace
    replaced: list[Path] = []

    def fail(path: Path, target: Path) -> Path:
        if target.parent == folder and target.name != MANIFEST:
            if len(replaced) == completed:
                raise OSError("stopped")
            replaced.append(path)
        return real(path, target)

    monkeypatch.setattr(Path, "replace", fail)
    with pytest.raises(OSError, match="stopped"):
        write_output_folder(check_output_folder(folder), {"a": b"2", "b": b"2", "c": b"2"}, {})
    monkeypatch.undo()
    write_output_folder(check_output_folder(folder), {"a": b"3", "b": b"2"}, {})
    assert _names(folder) == {"a", "b", MANIFEST}
    assert (folder / "a").read_bytes() == b"3"
    (folder / "a").write_text("changed")
    with pytest.raises(ValueError, match="has 'a', which has been changed"):
        check_output_folder(folder)


@pytest.fixture(name="small_disk")
def _small_disk() -> Iterator[None]:
    """Files of more than 1000 bytes cannot be written, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.usefixtures("small_disk")
def test_a_full_disk_names_the_file_and_leaves_nothing(tmp_path: Path) -> None:
    new = check_output_folder(tmp_path / "new")
    with pytest.raises(OSError, match=f"'{new / 'deep/large'}'"):
        write_output_folder(new, {"a": b"1", "deep/large": bytes(5000)}, {})
    assert list(tmp_path.iterdir()) == []
    old = check_output_folder(tmp_path / "old")
    write_output_folder(old, {"a": b"1"}, {})
    with pytest.raises(OSError, match=f"'{old / 'large'}'"):
        write_output_folder(check_output_folder(old), {"a": b"2", "large": bytes(5000)}, {})
    assert _names(old) == {"a", MANIFEST}
    assert (old / "a").read_bytes() == b"1"
    with pytest.raises(OSError, match=f"'{tmp_path / 'model.pte'}'"):
        write_atomically(tmp_path / "model.pte", bytes(5000))
    assert list(tmp_path.iterdir()) == [old]


def test_other_files_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match=r"folder: '.*' has 'notes.txt', which save_firmware did not write"):
        save_firmware(b"", tmp_path)
    folder = check_output_folder(tmp_path / "made")
    write_output_folder(folder, {"a": b"1"}, {})
    (folder / "a").write_text("changed")
    with pytest.raises(ValueError, match=r"'.*made' has 'a', which has been changed since save_firmware wrote it"):
        check_output_folder(folder)
    with pytest.raises(ValueError, match=r"'.*a' is a file; give a folder"):
        check_output_folder(folder / "a")
    with pytest.raises(ValueError, match=r"cannot create '.*': there is no directory"):
        check_output_folder(tmp_path / "none" / "made")


def test_folders_that_cannot_be_written() -> None:
    with pytest.raises(ValueError, match="cannot write '/proc/"):
        check_output_folder("/proc/firmware")


def test_paths_outside_the_folder_in_a_manifest_are_ignored(tmp_path: Path) -> None:
    other = tmp_path / "precious"
    other.write_text("mine")
    folder = tmp_path / "made"
    folder.mkdir()
    (folder / MANIFEST).write_text(json.dumps({"sha256": {"../precious": "", str(other): ""}}))
    write_output_folder(check_output_folder(folder), {"a": b"1"}, {})
    assert other.read_text() == "mine"
    assert _names(folder) == {"a", MANIFEST}


def test_tensors_without_elements(tmp_path: Path) -> None:
    class Beside(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
            return self.layer(x), y

    samples = [(torch.randn(1, 8), torch.zeros(0, 3)) for _ in range(2)]
    result = export(Beside().eval(), ExportRecipe.get_recipe(ArmRecipeType.ETHOSU_U55_INT8), samples)
    assert result.save_firmware(tmp_path / "firmware", samples).cases == 2


def test_programs_for_other_targets_raise(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"method 'forward' has a delegate for TOSABackend; .* the ETHOSU recipes"):
        export_small(ArmRecipeType.TOSA_INT8).save_firmware(tmp_path / "firmware")
    recipe = ExportRecipe.get_recipe(ArmRecipeType.ETHOSU_U85_INT8, direct_drive=True)
    result = export(Small().eval(), recipe, images())
    with pytest.raises(ValueError, match=r"a command stream of the format COP2, .* export without direct_drive"):
        result.save_firmware(tmp_path / "firmware")
    foreign = remove_checksums(program("quantized_u55").buffer).replace(b"fast_scratch_size", b"fast_scratch_else")
    with pytest.raises(ValueError, match=r"of another exporter, which does not state its size of fast scratch"):
        save_firmware(foreign, tmp_path / "firmware")
    assert not (tmp_path / "firmware").exists()


def test_methods_with_the_same_macro_name_raise(tmp_path: Path) -> None:
    models = {name: Small().eval() for name in ("run", "Run")}
    recipe = ExportRecipe.get_recipe(ArmRecipeType.ETHOSU_U55_INT8)
    result = export(models, recipe, dict.fromkeys(models, images(2)))
    with pytest.raises(ValueError, match=r"methods '.un' and '.un' have the same name in upper case"):
        result.save_firmware(tmp_path / "firmware")


def test_two_calls_write_the_same_bytes(tmp_path: Path) -> None:
    contents = []
    for parent in ("first", "second"):
        (tmp_path / parent).mkdir()
        firmware = program("float_u55").save_firmware(tmp_path / parent / "firmware")
        names = [*firmware.files, MANIFEST]
        contents.append({name: (tmp_path / parent / "firmware" / name).read_bytes() for name in names})
    assert contents[0] == contents[1]


@pytest.mark.parametrize(
    ("samples", "message"),
    [
        ([(torch.zeros(1, 3, 8, 9),)], r"samples\[0\] of method 'forward'"),
        ({"other": []}, "samples: no method 'other' in the program; it has forward"),
        ([torch.zeros(1, 3, 8, 8)], r"samples\[0\] of method 'forward' must be a tuple of the model's inputs"),
    ],
    ids=["shape", "method", "no tuple"],
)
def test_samples_that_do_not_fit(tmp_path: Path, samples: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        program("float_u55").save_firmware(tmp_path / "firmware", samples)
    assert not (tmp_path / "firmware").exists()
    quantized = program("quantized_u55").buffer
    with pytest.raises(ValueError, match=r"'x' is float32\[1, 3, 8, 8\], the program takes int8\[1, 3, 8, 8\]"):
        save_firmware(quantized, tmp_path / "firmware", [(torch.zeros(1, 3, 8, 8),)])
