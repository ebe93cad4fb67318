"""``cache_dir``: the key of an entry covers everything that the export depends on."""

from __future__ import annotations

import copy
import errno
import functools
import pickle
import shutil
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from executorch.backends.xnnpack.recipes import XNNPackRecipeType
from executorch.export import ExportRecipe
from torch import Tensor, nn

from arm_backend_core import disk_cache
from arm_backend_core.quantization import get_symmetric_a16w8_quantization_config
from arm_recipes import ArmRecipesWarning, ArmRecipeType, ExportResult, export
from arm_recipes.cli.main import main
from arm_recipes.pipeline.cache import key
from arm_recipes.pipeline.cache.digest import Digest, NotCacheable
from arm_recipes.pipeline.cache.store import CacheEntry, CorruptEntry, Store
from arm_recipes.samples.call_inputs import Inputs
from tests.small_models import Small, images, run

INT8 = ArmRecipeType.TOSA_INT8


def _export(
    folder: Path,
    model: nn.Module | None = None,
    samples: Any = None,
    recipe: ExportRecipe | None = None,
    **options: Any,
) -> ExportResult:
    chosen = recipe or ExportRecipe.get_recipe(INT8)
    return export(model or Small().eval(), chosen, samples or images(), cache_dir=folder, **options)


@pytest.fixture(scope="module")
def cached_export(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, ExportResult]:
    """A folder with one export of ``Small``."""
    folder = tmp_path_factory.mktemp("cache")
    return folder, _export(folder)


def test_an_unchanged_export_is_read_from_the_cache(cached_export: tuple[Path, ExportResult]) -> None:
    folder, first = cached_export
    again = _export(folder)
    assert (first.report.cached, again.report.cached) == (False, True)
    assert again.report.seconds.keys() == {"torch_export", "cache"}
    assert again.buffer == first.buffer
    assert again.stored_bytes == first.stored_bytes
    assert again.report.methods == first.report.methods
    assert "from the cache" in str(again.report)
    assert "taken from cache_dir" in again.report.notes[-1]
    assert torch.equal(run(again, *images()[0]), run(first, *images()[0]))


def test_a_cached_result_computes_missing_artefacts_on_demand(
    cached_export: tuple[Path, ExportResult], tmp_path: Path
) -> None:
    folder, first = cached_export
    again = _export(folder)
    again.save(tmp_path / "model.pte", reference=True)
    assert (tmp_path / "model.pte").read_bytes() == first.buffer
    compared, expected = (result.compare(images(), layers=False, progress=False) for result in (again, first))
    assert compared.outputs == expected.outputs
    graphs = [str(result.exported_programs["forward"].graph) for result in (again, first)]
    assert graphs[0] == graphs[1]


def test_a_cached_result_refuses_graphs_of_a_model_trained_meanwhile(cached_export: tuple[Path, ExportResult]) -> None:
    model = Small().eval()
    again = _export(cached_export[0], model)
    with torch.no_grad():
        model.head.weight.mul_(2.0)
    assert again.report.cached
    with pytest.raises(ValueError, match=r"changed since the export: 'head\.weight' was written"):
        _ = again.exported_programs


class Doubled(Small):
    def forward(self, x: Tensor) -> Tensor:
        """As ``Small``, and one operator more."""
        return super().forward(x) * 2.0


def _with_changed_weight() -> nn.Module:
    model = Small().eval()
    with torch.no_grad():
        model.head.weight[0, 0] += 1e-6
    return model


def _with_tied_parameters() -> nn.Module:
    model = Small().eval()
    model.body[1].bias = model.body[1].weight
    return model


def _changed_quantizer() -> ExportRecipe:
    recipe: Any = ExportRecipe.get_recipe(INT8)
    recipe.quantization_recipe.quantizers[0].set_module_name("head", get_symmetric_a16w8_quantization_config())
    return recipe


@pytest.mark.parametrize(
    "changed",
    [
        lambda: {"model": Doubled().eval()},
        lambda: {"model": _with_changed_weight()},
        lambda: {"model": _with_tied_parameters()},
        lambda: {"model": Small().train()},
        lambda: {"samples": images(5)},
        lambda: {"samples": [images()[0], *images()[2:], images()[1]]},
        lambda: {"recipe": ExportRecipe.get_recipe(INT8, quantized_io=True)},
        lambda: {"recipe": ExportRecipe.get_recipe(INT8, calibration_samples=images(2))},
        lambda: {"recipe": ExportRecipe.get_recipe(ArmRecipeType.TOSA_A16W8)},
        lambda: {"recipe": _changed_quantizer()},
        lambda: {"constant_methods": {"version": 2}},
        lambda: {"channels_last": True},
    ],
    ids=[
        *("graph", "weight", "tied", "training", "more samples", "order of samples", "option", "calibration_samples"),
        *("recipe", "quantizer", "constant", "layout"),
    ],
)
def test_any_change_gives_another_key(
    changed: Callable[[], dict[str, Any]], cached_export: tuple[Path, ExportResult]
) -> None:
    folder = cached_export[0]
    keys = _keys(folder, **changed())
    assert len(keys) == 1
    assert keys.isdisjoint({file.stem for file in folder.iterdir()})
    assert keys == _keys(folder, **changed())


def _keys(folder: Path, **options: Any) -> set[str]:
    """Compute the keys that an export looks up, and stop there."""

    class LookupRecorded(Exception):
        pass

    keys = set[str]()

    class RecordingStore(Store):
        def read(self, key: str) -> CacheEntry | None:
            keys.add(key)
            raise LookupRecorded

    with pytest.MonkeyPatch.context() as patch, suppress(LookupRecorded):
        patch.setattr("arm_recipes.pipeline.cache.lookup.Store", RecordingStore)
        _export(folder, **options)
    return keys


def test_sharing_between_methods_is_part_of_the_key(tmp_path: Path) -> None:
    class Two(nn.Module):
        def __init__(self, shared: nn.Module, own: nn.Module) -> None:
            super().__init__()
            self.shared, self.own = shared, own

        def forward(self, x: Tensor) -> Tensor:
            return self.own(self.shared(x))

    def keys(copies: Callable[[nn.Module], nn.Module]) -> set[str]:
        torch.manual_seed(0)
        shared, one, two = (nn.Linear(4, 4) for _ in range(3))
        models: Any = {"one": Two(shared, one).eval(), "two": Two(copies(shared), two).eval()}
        x = [(torch.ones(1, 4),)]
        return _keys(tmp_path, model=models, samples={"one": x, "two": x})

    def of_the_same_tensors(module: nn.Module) -> nn.Module:
        return copy.deepcopy(module, {id(x): x for x in module.parameters()})

    one_module = keys(lambda module: module)
    assert one_module == keys(lambda module: module)
    assert len(one_module | keys(of_the_same_tensors) | keys(copy.deepcopy)) == 3


@pytest.mark.parametrize("attribute", ["source_digest", "version"])
def test_another_source_or_version_gives_another_key(
    attribute: str, cached_export: tuple[Path, ExportResult], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(key, attribute, lambda *_: "another")
    assert _keys(cached_export[0]).isdisjoint({file.stem for file in cached_export[0].iterdir()})


def test_digest_of_sources_changes_with_a_file(tmp_path: Path) -> None:
    assert key.digest_of_sources([tmp_path]) == key.digest_of_sources([tmp_path])
    before = key.digest_of_sources([tmp_path])
    (tmp_path / "more.py").write_text("x = 1")
    assert key.digest_of_sources([tmp_path]) != before


class Evil:
    """A pickle that runs code when it is read."""

    def __reduce__(self) -> Any:
        return (sys.exit, ("read",))


def _damage(file: Path, how: str) -> None:
    data = file.read_bytes()
    store = Store(file.parent)
    if how == "empty":
        file.write_bytes(b"")
    elif how == "cut":
        file.write_bytes(data[:-1])
    elif how == "flipped bit":
        file.write_bytes(data[:5000] + bytes([data[5000] ^ 1]) + data[5001:])
    elif how == "entry of another key":
        store.write("0" * 64, CacheEntry(*_read(store, file)))
        store.file("0" * 64).replace(file)
    else:
        file.write_bytes(pickle.dumps(Evil()))


def _read(store: Store, file: Path) -> Iterator[Any]:
    saved = store.read(file.stem)
    assert saved is not None
    yield from (saved.report, saved.program, saved.warnings, saved.data_file)


@pytest.mark.parametrize("how", ["empty", "cut", "flipped bit", "entry of another key", "foreign"])
def test_a_damaged_file_is_not_read(how: str, cached_export: tuple[Path, ExportResult], tmp_path: Path) -> None:
    (file,) = cached_export[0].glob("*.export")
    copied = Path(shutil.copy(file, tmp_path))
    assert Store(tmp_path).read(copied.stem) is not None
    _damage(copied, how)
    with pytest.raises(CorruptEntry, match=r"^it is not a file of this cache|^its content does not match its digest"):
        Store(tmp_path).read(copied.stem)


def test_a_damaged_file_is_reported_and_replaced(cached_export: tuple[Path, ExportResult], tmp_path: Path) -> None:
    (file,) = cached_export[0].glob("*.export")
    _damage(Path(shutil.copy(file, tmp_path)), "cut")
    with pytest.warns(ArmRecipesWarning, match="is ignored and replaced: its content does not match its digest"):
        again = _export(tmp_path)
    assert again.buffer == cached_export[1].buffer
    assert "ignored and replaced" in again.report.notes[-1]
    third = _export(tmp_path)
    assert third.report.cached
    assert not any("ignored and replaced" in note for note in third.report.notes)


def test_entries_unpickle_report_classes_only(tmp_path: Path) -> None:
    store = Store(tmp_path)
    saved: Any = type("Saved", (), {"report": Evil(), "program": b"", "warnings": (), "data_file": None})
    store.write("a", saved)
    with pytest.raises(CorruptEntry, match=r"'sys\.exit' is not part of a report"):
        store.read("a")


def test_an_entry_has_concurrent_readers_and_writers(tmp_path: Path, cached_export: tuple[Path, ExportResult]) -> None:
    (file,) = cached_export[0].glob("*.export")
    saved = CacheEntry(*_read(Store(cached_export[0]), file))

    def use(number: int) -> bool:
        store = Store(tmp_path)
        if number % 2:
            store.write("a", saved)
        found = store.read("a")
        return found is None or found.program == saved.program

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(use, range(40)))
    assert [path.name for path in tmp_path.iterdir()] == ["a.export"]


def test_calibration_data_that_change_between_reads_are_not_cached(tmp_path: Path) -> None:
    def drawn() -> list[tuple[Tensor, ...]]:
        return [(torch.randn(1, 3, 8, 8),) for _ in range(2)]

    recipe = ExportRecipe.get_recipe(INT8, calibration_samples=drawn)
    with pytest.warns(ArmRecipesWarning, match="differ each time they are read"):
        result = _export(tmp_path, recipe=recipe)
    assert "differ each time" in result.report.notes[-1]
    assert list(tmp_path.iterdir()) == []


def test_an_export_is_complete_even_if_its_file_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(target: Path, *_chunks: bytes) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", str(target))

    monkeypatch.setattr(disk_cache, "write_atomically", fail)
    with pytest.warns(
        ArmRecipesWarning, match=r"cache_dir: .* not cached, because .* No space left on device: .*export"
    ):
        result = _export(tmp_path)
    assert "No space left" in result.report.notes[-1]
    assert result.report.delegates


def test_a_generator_of_samples_has_the_key_of_a_list(tmp_path: Path) -> None:
    first = _export(tmp_path, recipe=ExportRecipe.get_recipe(INT8, calibration_samples=iter(images(3))))
    again = _export(tmp_path, recipe=ExportRecipe.get_recipe(INT8, calibration_samples=images(3)))
    assert again.report.cached
    assert again.buffer == first.buffer
    assert first.report.methods[0].quantization is not None
    assert first.report.methods[0].quantization.samples == 3


@pytest.mark.parametrize(
    ("recipe", "reason"),
    [
        (
            lambda _: ExportRecipe.combine(
                [ExportRecipe.get_recipe(ArmRecipeType.TOSA_FP), ExportRecipe.get_recipe(XNNPackRecipeType.FP32)]
            ),
            "a combined recipe",
        ),
        (lambda folder: ExportRecipe.get_recipe(INT8, dump_dir=folder / "dump"), "the files in dump_dir"),
    ],
    ids=["combined", "dump_dir"],
)
def test_exports_without_a_complete_key_are_not_cached(
    recipe: Callable[[Path], ExportRecipe], reason: str, tmp_path: Path
) -> None:
    with pytest.warns(ArmRecipesWarning, match=f"not cached, because .* {reason}"):
        _export(tmp_path / "cache", recipe=recipe(tmp_path))
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_cache_dir_that_cannot_be_created_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="cache_dir: cannot create"):
        _export(tmp_path / "file" / "cache")


def test_the_command_line_caches_programs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = tmp_path / "small.pt2"
    torch.export.save(torch.export.export(Small().eval(), images(1)[0]), str(model))
    arguments = ["export", str(model), "--recipe", "TOSA_INT8", "--cache-dir", str(tmp_path / "cache"), "--json"]
    assert main(arguments) == 0
    written = model.with_suffix(".pte").read_bytes()
    assert '"cached": false' in capsys.readouterr().out
    assert main(arguments) == 0
    printed = capsys.readouterr()
    assert '"cached": true' in printed.out
    assert "warning: calibration used only one sample" in printed.err
    assert model.with_suffix(".pte").read_bytes() == written


# -- digests ----------------------------------------------------------------------------------------------------------


def _digest(*values: Any) -> str:
    digest = Digest()
    for value in values:
        digest.add(value)
    return digest.hexdigest()


def test_different_values_have_different_digests() -> None:
    eye = torch.eye(2)
    different: list[Any] = [1, 1.0, True, "1", b"1", None, [1], (1,), {1}, {1: None}, [[1]], -0.0, 0.0, float("nan")]
    different += [eye, eye.half(), eye.bfloat16(), eye.to(torch.int8), eye[:1], eye * -0.0, eye.to("meta"), torch.int8]
    different += [torch.relu, torch.sigmoid, torch.ops.aten.relu.default, torch.nn.ReLU, {"a": 1, "b": 2}]
    digests = [_digest(value) for value in different]
    assert len(set(digests)) == len(digests)
    assert [_digest(value) for value in different] == digests
    assert _digest("ab", "c") != _digest("a", "bc")
    assert _digest(torch.ones(2, 3).T) != _digest(torch.ones(3, 2))


def test_a_list_that_contains_itself_has_a_digest() -> None:
    ring: list[Any] = [1]
    ring.append(ring)
    assert _digest(ring) == _digest(ring)
    assert _digest(ring) != _digest([1, [1]])


def _sample_digest(*samples: Inputs) -> str:
    digest = Digest()
    for sample in samples:
        digest.add_sample(sample)
    return digest.hexdigest()


def test_different_samples_have_different_digests() -> None:
    x, y = torch.zeros(2), torch.ones(2)
    different: list[tuple[Inputs, ...]] = [(), (Inputs(x),), (Inputs(y),), (Inputs(x, x),), (Inputs((x, x)),)]
    different += [(Inputs(x), Inputs(x)), (Inputs(x=x),), (Inputs(y=x),), (Inputs(x, 1),), (Inputs(x, None),)]
    digests = [_sample_digest(*samples) for samples in different]
    assert len(set(digests)) == len(digests)
    assert _sample_digest(Inputs(torch.zeros(2))) == _sample_digest(Inputs(x))


def test_samples_in_one_buffer_are_read_each_time() -> None:
    """A data set may write each sample into the same tensor."""
    digests = []
    for value in (1.0, 2.0):
        digest, buffer = Digest(), torch.zeros(2)
        digest.add_sample(Inputs(buffer))
        digest.add_sample(Inputs(buffer.fill_(value)))
        digests.append(digest.hexdigest())
    assert digests[0] != digests[1]


@functools.wraps(torch.nn.functional.relu)
def _wrapping(x: Tensor) -> Tensor:
    return x


@pytest.mark.parametrize("value", [lambda: 1, Small(), Doubled, iter(()), torch.ones(2).to_sparse(), _wrapping])
def test_values_without_a_known_content_are_not_cacheable(value: Any) -> None:
    with pytest.raises(NotCacheable):
        _digest([value])
