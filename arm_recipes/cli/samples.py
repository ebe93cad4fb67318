"""Samples that a user names on the command line: files of arrays, folders of them or of images, or a function."""

from __future__ import annotations

import importlib
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np

    from arm_recipes.runtime.tensor_info import TensorInfo

    Array = np.ndarray[Any, Any]

_FUNCTION = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")
_ARRAYS = frozenset({".npy", ".npz"})
_IMAGES = frozenset({".png", ".jpg", ".jpeg", ".bmp", ".webp", ".ppm", ".pgm"})


@dataclass(frozen=True)
class Images:
    """What is done to the channels of images, whose values are 0 to 1: ``(x - mean) / std``."""

    mean: tuple[float, ...]
    std: tuple[float, ...]


def check_source(source: str, argument: str) -> None:
    """Find out whether samples can be read there, without importing anything that takes time.

    Raises:
        ValueError: they cannot.
    """
    path = Path(source).expanduser()
    if not path.exists():
        if _FUNCTION.fullmatch(source):
            return
        raise ValueError(f"{argument}: there is no '{source}': {_expected()}")
    if path.is_dir():
        _files(path, argument)
    elif path.suffix.lower() not in _ARRAYS | _IMAGES:
        raise ValueError(f"{argument}: '{source}' is none of these: {_expected()}")


def read_samples(source: str, argument: str, slots: Sequence[TensorInfo], images: Images) -> Any:
    """The samples of a source.

    An array is one sample if it has the input's shape; several if it has one dimension more, or another size of the
    first one, which is cut into pieces of the input's (the last piece is filled up from the beginning).

    Args:
        argument: how messages call it.
        slots: inputs, in order.

    Returns:
        a list of tuples of tensors; for ``module:function`` the function, which gives what ``export`` takes.

    Raises:
        ValueError: there is nothing, or it does not fit; the message names file, input and shape.
    """
    check_source(source, argument)
    path = Path(source).expanduser()
    if not path.exists():
        return _function(source, argument)
    samples: list[tuple[Any, ...]] = []
    for file in _files(path, argument) if path.is_dir() else [path]:
        samples += _of_file(file, argument, slots, images)
    return samples


def _expected() -> str:
    return "give a .npz or .npy file, a folder of them or of images, or module:function, which returns samples"


def _files(folder: Path, argument: str) -> list[Path]:
    """Arrays or images of a folder, by name.

    Raises:
        ValueError: there are none, or both kinds.
    """
    kinds = [
        sorted(file for file in folder.iterdir() if file.suffix.lower() in kind and file.is_file())
        for kind in (_ARRAYS, _IMAGES)
    ]
    if all(kinds):
        raise ValueError(f"{argument}: '{folder}' has arrays and images; keep one kind there")
    files = kinds[0] or kinds[1]
    if not files:
        raise ValueError(f"{argument}: '{folder}' has no .npy, .npz or image: {_expected()}")
    return files


def _function(source: str, argument: str) -> Callable[[], Any]:
    module, _, name = source.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # as "python -m" does; a console script has its own folder there
    try:
        found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"{argument}: '{source}' cannot be imported from here: {error}") from error
    if not callable(found):
        raise ValueError(f"{argument}: '{source}' is of type {type(found).__name__}, not a function without arguments")
    function: Callable[[], Any] = found
    return function


def _of_file(file: Path, argument: str, slots: Sequence[TensorInfo], images: Images) -> list[tuple[Any, ...]]:
    """Samples of one file."""
    what = f"{argument}: '{file}'"
    if file.suffix.lower() in _IMAGES:
        if len(slots) != 1:
            raise ValueError(f"{what} is an image, and the model takes {len(slots)} inputs: give .npz files")
        columns = [_pieces(_image(file, slots[0], images, what), slots[0], what)]
    else:
        arrays = _arrays(file, slots, what)
        columns = [_pieces(array, slot, what) for array, slot in zip(arrays, slots, strict=True)]
    counts = [len(column) for column in columns]
    if len(set(counts)) != 1:
        told = ", ".join(f"{slot.name}: {count}" for slot, count in zip(slots, counts, strict=True))
        raise ValueError(f"{what} has different numbers of samples ({told})")
    return list(zip(*columns, strict=True))


def _arrays(file: Path, slots: Sequence[TensorInfo], what: str) -> list[Array]:
    """An array for each input: by name, or in the order in which they are."""
    import numpy as np

    try:
        loaded = np.load(file, allow_pickle=False)
        found: Mapping[str, Array] = {"": loaded} if isinstance(loaded, np.ndarray) else dict(loaded)
    except (OSError, ValueError) as error:
        raise ValueError(f"{what} cannot be read as arrays: {error}") from error
    names = [slot.name for slot in slots]
    if set(names) <= set(found):
        return [found[name] for name in names]
    if len(found) == len(names):
        return list(found.values())
    raise ValueError(f"{what} has the arrays {', '.join(found) or 'none'}; the model takes {', '.join(names)}")


def _pieces(array: Array, slot: TensorInfo, what: str) -> list[Any]:
    """The samples of an array, as tensors of the input."""
    shape = tuple(slot.shape)
    if array.shape == shape or (1, *array.shape) == shape:
        pieces = [array.reshape(shape)]
    elif array.shape[1:] == shape:
        pieces = list(array)
    elif shape and array.shape[1:] == shape[1:] and len(array):
        pieces = list(_batches(array, shape[0]))
    else:
        raise ValueError(f"{what}: input '{slot.name}' has the shape {list(shape)}, the array {list(array.shape)}")
    return [_tensor(piece, slot, what) for piece in pieces]


def _batches(array: Array, count: int) -> Iterator[Array]:
    import numpy as np

    for start in range(0, len(array), count):
        yield array.take(np.arange(start, start + count), axis=0, mode="wrap")


def _tensor(array: Array, slot: TensorInfo, what: str) -> Any:
    """As the input's dtype, where no number changes its kind; real numbers of a quantized input are quantized."""
    import torch

    from arm_backend_core.kinds import ScalarKind, kind_of

    tensor = torch.from_numpy(array.copy(order="C"))
    dtype: torch.dtype = getattr(torch, slot.dtype)
    given, taken = kind_of(tensor.dtype), kind_of(dtype)
    if given is ScalarKind.FLOAT and slot.scale is not None and taken is ScalarKind.INTEGER:
        return slot.quantize(tensor)
    if given is not taken or (
        taken is ScalarKind.INTEGER and not torch.equal(tensor.to(dtype).to(tensor.dtype), tensor)
    ):
        raise ValueError(
            f"{what}: input '{slot.name}' is {slot.dtype}, the array {array.dtype}: convert it, with the scaling that "
            "the model was trained with"
        )
    return tensor.to(dtype)


def _image(file: Path, slot: TensorInfo, images: Images, what: str) -> Array:
    """An image in the size of the input [N, C, H, W]: scaled until it covers that, then its middle."""
    import numpy as np

    if len(slot.shape) != 4 or slot.shape[1] not in (1, 3) or not slot.dtype.startswith("float"):
        raise ValueError(f"{what} is an image; the model takes {slot}, not float [N, 1 or 3, height, width]")
    try:
        from PIL import Image, ImageOps, UnidentifiedImageError
    except ImportError as error:
        raise ValueError(
            f"{what}: Pillow, which reads images, is not installed: pip install 'arm-recipes[images]'"
        ) from error
    _, channels, height, width = slot.shape
    for name, values in (("--mean", images.mean), ("--std", images.std)):
        if len(values) not in (1, channels):
            raise ValueError(f"{name} has {len(values)} numbers; the model's images have {channels} channels")
    try:
        with Image.open(file) as opened:
            upright = ImageOps.exif_transpose(opened).convert("RGB" if channels == 3 else "L")
    except (OSError, UnidentifiedImageError) as error:
        raise ValueError(f"{what} cannot be read as an image: {error}") from error
    fitted = ImageOps.fit(upright, (width, height), Image.Resampling.BILINEAR)
    pixels = np.asarray(fitted, np.float32).reshape(height, width, channels) / 255
    scaled = (pixels - np.asarray(images.mean, np.float32)) / np.asarray(images.std, np.float32)
    return np.ascontiguousarray(scaled.transpose(2, 0, 1)[None])
