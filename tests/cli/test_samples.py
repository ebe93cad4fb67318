"""Samples that the command line reads: files of arrays, folders of them and of images, and functions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader, TensorDataset

from arm_recipes.cli.samples import (
    DYNAMIC_SIZE,
    ImageNormalization,
    check_returned_samples,
    check_source,
    read_samples,
)
from arm_recipes.runtime.tensor_info import TensorInfo
from arm_recipes.samples.call_inputs import Inputs, InputSignature

_IDENTITY_NORMALIZATION = ImageNormalization((0.0,), (1.0,))
_ONE = TensorInfo("x", "float32", (2, 3))
_IMAGE = TensorInfo("image", "float32", (1, 3, 4, 6))


def _read(path: Path, *slots: TensorInfo, images: ImageNormalization = _IDENTITY_NORMALIZATION) -> Any:
    return read_samples(str(path), "--inputs", slots, images)


@pytest.mark.parametrize(
    ("shape", "count"),
    [
        pytest.param((2, 3), 1, id="a sample"),
        pytest.param((3,), None, id="part of a sample"),
        pytest.param((5, 2, 3), 5, id="samples along an axis of their own"),
        pytest.param((6, 3), 3, id="a long batch"),
        pytest.param((2, 4), None, id="another shape"),
        pytest.param((0, 3), None, id="none"),
        pytest.param((0, 2, 3), None, id="no sample along an axis of their own"),
    ],
)
def test_number_of_samples_in_an_array(shape: tuple[int, ...], count: int | None, tmp_path: Path) -> None:
    array = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    np.save(tmp_path / "x.npy", array)
    if count is None:
        with pytest.raises(ValueError, match=r"--inputs: .*x.npy': input 'x' has the shape \[2, 3\], the array"):
            _read(tmp_path / "x.npy", _ONE)
        return
    samples = _read(tmp_path / "x.npy", _ONE)
    assert len(samples) == count
    given = torch.from_numpy(array).reshape(-1, 2, 3)
    for (tensor,), expected in zip(samples, given, strict=True):
        assert torch.equal(tensor, expected)


def test_the_last_batch_is_padded(tmp_path: Path) -> None:
    array = np.arange(9, dtype=np.float32).reshape(3, 3)
    np.save(tmp_path / "x.npy", array)
    (_,), (last,) = _read(tmp_path / "x.npy", _ONE)
    assert last.tolist() == [array[2].tolist(), array[0].tolist()]


def test_arrays_by_name_or_in_order(tmp_path: Path) -> None:
    slots = TensorInfo("a", "float32", (1,)), TensorInfo("b", "int64", (1,))
    a, b = np.array([1.5], np.float64), np.array([2], np.int32)
    np.savez(tmp_path / "named.npz", b=b, a=a)
    np.savez(tmp_path / "ordered.npz", a, b)
    for name in ("named", "ordered"):
        ((first, second),) = _read(tmp_path / f"{name}.npz", *slots)
        assert (first.dtype, first.item(), second.dtype, second.item()) == (torch.float32, 1.5, torch.int64, 2)
    np.savez(tmp_path / "few.npz", a=a)
    with pytest.raises(ValueError, match="has the arrays a; the model takes a, b"):
        _read(tmp_path / "few.npz", *slots)
    np.savez(tmp_path / "uneven.npz", a=np.zeros((3, 1)), b=np.zeros((2, 1), np.int64))
    with pytest.raises(ValueError, match=r"different numbers of samples \(a: 3, b: 2\)"):
        _read(tmp_path / "uneven.npz", *slots)


def test_a_folder_by_names_of_files(tmp_path: Path) -> None:
    for name, value in (("b", 2.0), ("a", 1.0), ("c", 3.0)):
        np.save(tmp_path / f"{name}.npy", np.full((2, 3), value, np.float32))
    assert [tensor[0, 0].item() for (tensor,) in _read(tmp_path, _ONE)] == [1, 2, 3]


@pytest.mark.parametrize(
    ("array", "slot", "message"),
    [
        (
            np.zeros(3, np.uint8),
            TensorInfo("x", "float32", (3,)),
            r"takes floating point values \(float32\), the array has uint8; .* scaling",
        ),
        (
            np.full(3, 0.5),
            TensorInfo("x", "int64", (3,)),
            r"takes integer values \(int64\), the array has float64; convert it$",
        ),
        (np.array([-3, 2, 300]), TensorInfo("x", "int8", (3,)), "is int8; .* from -3 to 300, do not fit"),
        (np.ones(3), TensorInfo("x", "bool", (3,)), r"takes boolean values \(bool\), the array has float64"),
    ],
)
def test_lossy_dtype_conversions_raise(array: Any, slot: TensorInfo, message: str, tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", array)
    with pytest.raises(ValueError, match=message):
        _read(tmp_path / "x.npy", slot)


def test_float_arrays_are_quantized_for_integer_inputs(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.array([0.5, -1.0, 100.0]))
    ((tensor,),) = _read(tmp_path / "x.npy", TensorInfo("x", "int8", (3,), 0.5, 1))
    assert tensor.tolist() == [2, -1, 127]


def test_images_are_resized_and_cropped(tmp_path: Path) -> None:
    # Twice the size and wider: the crop keeps the middle. Its edges are interpolated with pixels that are cropped.
    pixels = np.zeros((8, 16, 3), np.uint8)
    pixels[:, 2:14] = (255, 51, 0)
    Image.fromarray(pixels).save(tmp_path / "one.png")
    ((tensor,),) = _read(tmp_path, _IMAGE, images=ImageNormalization((0.0, 0.2, 0.0), (2.0, 1.0, 1.0)))
    assert tensor.shape == (1, 3, 4, 6)
    assert tensor.dtype == torch.float32
    expected = torch.tensor([0.5, 0.0, 0.0]).reshape(1, 3, 1, 1).expand(1, 3, 4, 6)
    assert torch.allclose(tensor[..., 1:-1], expected[..., 1:-1], atol=1e-6)


def test_grey_images(tmp_path: Path) -> None:
    Image.fromarray(np.full((4, 6, 3), 51, np.uint8)).save(tmp_path / "one.png")
    ((tensor,),) = _read(tmp_path / "one.png", TensorInfo("image", "float32", (1, 1, 4, 6)))
    assert torch.allclose(tensor, torch.full((1, 1, 4, 6), 0.2), atol=1e-6)


def test_an_array_without_the_batch_of_one(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.ones((4, 6), np.float32))
    ((tensor,),) = _read(tmp_path / "x.npy", TensorInfo("x", "float32", (1, 4, 6)))
    assert tensor.shape == (1, 4, 6)


def test_files_that_are_no_images_and_models_that_take_none(tmp_path: Path) -> None:
    (tmp_path / "bad.png").write_bytes(b"no image")
    with pytest.raises(ValueError, match=r"bad\.png' cannot be read as an image"):
        _read(tmp_path / "bad.png", _IMAGE)
    with pytest.raises(ValueError, match="the model takes float32"):
        _read(tmp_path / "bad.png", _ONE)
    with pytest.raises(ValueError, match="the model takes 2 inputs"):
        _read(tmp_path / "bad.png", _IMAGE, _IMAGE)
    with pytest.raises(ValueError, match="--mean has 2 numbers; the model's images have 3 channels"):
        _read(tmp_path / "bad.png", _IMAGE, images=ImageNormalization((0.0, 1.0), (1.0,)))


def test_samples_from_functions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_samples_module.py").write_text(
        "def made():\n    return [(1,), (2,)]\n\nvalue = 3\n"
        "def nothing():\n    pass\ndef fails():\n    return {}['data']\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert read_samples("my_samples_module:made", "--inputs", [_ONE], _IDENTITY_NORMALIZATION) == [(1,), (2,)]
    for name, reason in (
        ("value", "is of type int, not a function"),
        ("absent", r"cannot be imported: AttributeError: .* has no attribute 'absent'"),
        ("nothing", r"returned None; return a list of samples"),
        ("fails", r"failed: KeyError: 'data' \(.*my_samples_module.py:8\)"),
    ):
        with pytest.raises(ValueError, match=reason):
            read_samples(f"my_samples_module:{name}", "--inputs", [_ONE], _IDENTITY_NORMALIZATION)


def test_sources_are_checked_before_they_are_read(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "text.txt").write_text("")
    (tmp_path / "both").mkdir()
    (tmp_path / "both" / "a.npy").write_bytes(b"")
    (tmp_path / "both" / "a.png").write_bytes(b"")
    for source, reason in (
        ("nowhere.npz", "there is no 'nowhere.npz': give a .npz or .npy file"),
        (str(tmp_path / "empty"), "has no .npy, .npz or image"),
        (str(tmp_path / "text.txt"), "has an unknown type"),
        (str(tmp_path / "both"), "has both arrays and images; keep one kind"),
    ):
        with pytest.raises(ValueError, match=f"--samples: .*{reason}"):
            check_source(source, "--samples")
    check_source("json.decoder:function", "--samples")  # the function is looked up when the module is imported


def test_modules_are_checked_before_the_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=f"--samples: 'absent:f': there is no module 'absent' in '{tmp_path}'"):
        check_source("absent:f", "--samples")
    with pytest.raises(ValueError, match=r"'absent.module:f' cannot be imported: .*No module named 'absent'"):
        check_source("absent.module:f", "--samples")


_SIGNATURE = InputSignature.from_inputs(Inputs(torch.zeros(2, 3)))


@pytest.mark.parametrize(
    ("samples", "message"),
    [
        ([(torch.zeros(2, 3),), (torch.zeros(2, 4),)], r"samples\[1\], input 0 .* is float32\[2, 4\], the model takes"),
        ([(torch.zeros(2, 3).double(),)], r"samples\[0\], input 0 .* is float64"),
        (
            [torch.zeros(2, 3)],
            r"\[0\] of method 'forward' must be a tuple of the model's inputs",
        ),
        ([], "returned no samples"),
        (3, "must be a list of input tuples"),
        (DataLoader(TensorDataset(torch.zeros(4, 4)), batch_size=2), r"samples\[0\], input 0 .* is float32\[2, 4\]"),
    ],
)
def test_returned_samples_that_do_not_fit_name_the_function(samples: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        check_returned_samples(samples, _SIGNATURE, "--samples: 'a:b'")
    assert str(caught.value).startswith("--samples: 'a:b'")


def test_returned_samples_that_fit() -> None:
    samples = [(torch.zeros(2, 3),), (torch.ones(2, 3), "label")]
    assert check_returned_samples((sample for sample in samples), _SIGNATURE, "--samples: 'a:b'") == samples
    loader = DataLoader(TensorDataset(torch.zeros(8, 3), torch.zeros(8)), batch_size=4)
    assert check_returned_samples(loader, _SIGNATURE, "--samples: 'a:b'") is loader


def test_arrays_for_dynamic_sizes(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.zeros((4, 5, 3), np.float32))
    for shape, count in (((DYNAMIC_SIZE, 3), 4), ((4, DYNAMIC_SIZE, 3), 1), ((2, DYNAMIC_SIZE, 3), 2)):
        assert len(_read(tmp_path / "x.npy", TensorInfo("x", "float32", shape))) == count
