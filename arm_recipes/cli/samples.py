"""Samples on the command line: an array file, an image, a folder of arrays or images, or a Python function."""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np

    from arm_recipes.runtime.tensor_info import TensorInfo
    from arm_recipes.samples.call_inputs import Inputs, InputSignature

    Array = np.ndarray[Any, Any]

#: Size of a dynamic dimension in the inputs of ``read_samples``. Arrays of any size in this dimension are accepted.
DYNAMIC_SIZE = -1
_FUNCTION_PATTERN = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")
_ARRAY_SUFFIXES = frozenset({".npy", ".npz"})
_IMAGE_SUFFIXES = frozenset({".png", ".jpg", ".jpeg", ".bmp", ".webp", ".ppm", ".pgm"})


@dataclass(frozen=True)
class ImageNormalization:
    """Normalization of image channels: ``(x - mean) / std``, where x is a pixel scaled to 0..1."""

    mean: tuple[float, ...]
    std: tuple[float, ...]


def check_source(source: str, argument: str) -> None:
    """Check that a source of samples exists and has a known type, without importing PyTorch or the user's module.

    Raises:
        ValueError: the source is missing or of an unknown type, a folder has no samples or both arrays and images, or
            the module of a function cannot be found.
    """
    path = Path(source).expanduser()
    if not path.exists():
        if _FUNCTION_PATTERN.fullmatch(source):
            _check_module(source, argument)
            return
        raise ValueError(f"{argument}: there is no '{source}': {_accepted_sources()}")
    if path.is_dir():
        _list_files(path, argument)
    elif path.suffix.lower() not in _ARRAY_SUFFIXES | _IMAGE_SUFFIXES:
        raise ValueError(f"{argument}: '{source}' has an unknown type: {_accepted_sources()}")


def read_samples(
    source: str, argument: str, input_infos: Sequence[TensorInfo], normalization: ImageNormalization
) -> Any:
    """Read the samples of a source.

    An array with the input's shape is one sample, also if a leading dimension of size 1 is missing. An array with an
    additional leading dimension holds several samples. If the batch size of the input is fixed and differs from the
    array's, the array is split into batches of the input's size. If the last batch is incomplete, items from the
    beginning of the array fill it up.

    Args:
        source: array file, folder of array files or images, image, or ``module:function``.
        argument: name of the argument in messages.
        input_infos: inputs of the model, in order.
        normalization: normalization of images.

    Returns:
        A list of tuples of tensors. For ``module:function``, the return value of the function: samples of any type
            that ``export`` accepts.

    Raises:
        ValueError: there are no samples, they do not fit the inputs, or the function fails. The message names file,
            input and shape, or the function and the line.
    """
    check_source(source, argument)
    path = Path(source).expanduser()
    if not path.exists():
        return _call_function(_import_function(source, argument), f"{argument}: '{source}'")
    samples: list[tuple[Any, ...]] = []
    for file in _list_files(path, argument) if path.is_dir() else [path]:
        samples += _read_file(file, argument, input_infos, normalization)
    return samples


def _accepted_sources() -> str:
    return "give a .npz or .npy file, an image, a folder of such files, or module:function, which returns samples"


def _list_files(folder: Path, argument: str) -> list[Path]:
    """List the array files or images of a folder, sorted by name.

    Raises:
        ValueError: the folder has none, or both kinds.
    """
    files_by_kind = [
        sorted(file for file in folder.iterdir() if file.suffix.lower() in suffixes and file.is_file())
        for suffixes in (_ARRAY_SUFFIXES, _IMAGE_SUFFIXES)
    ]
    if all(files_by_kind):
        raise ValueError(f"{argument}: '{folder}' has both arrays and images; keep one kind")
    files = files_by_kind[0] or files_by_kind[1]
    if not files:
        raise ValueError(f"{argument}: '{folder}' has no .npy, .npz or image: {_accepted_sources()}")
    return files


def is_function(source: str) -> bool:
    """Whether a source that ``check_source`` accepts is ``module:function``."""
    return not Path(source).expanduser().exists()


def _add_working_folder() -> None:
    """Add the current folder to ``sys.path``, as "python -m" does. For a console script, Python does not add it."""
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())


def _check_module(source: str, argument: str) -> None:
    """Check that the module of ``module:function`` exists. Imports only the packages that contain it.

    Raises:
        ValueError: there is no such module.
    """
    _add_working_folder()
    module = source.partition(":")[0]
    try:
        found = importlib.util.find_spec(module) is not None
    except Exception as error:
        raise _make_import_error(source, argument, error) from error
    if not found:
        raise ValueError(
            f"{argument}: '{source}': there is no module '{module}' in '{os.getcwd()}' or among the installed packages"
        )


def _make_import_error(source: str, argument: str, error: Exception) -> ValueError:
    return ValueError(f"{argument}: '{source}' cannot be imported: {_describe_error(error)}")


def _describe_error(error: Exception) -> str:
    """Describe an exception of the user's module, with the innermost line of the traceback."""
    frames = traceback.extract_tb(error.__traceback__)
    lines = [
        f"{x.filename}:{x.lineno}" for x in frames if not x.filename.startswith(("<", importlib.__file__, __file__))
    ]
    return f"{type(error).__name__}: {error}{f' ({lines[-1]})' if lines else ''}"


def _import_function(source: str, argument: str) -> Callable[[], Any]:
    _add_working_folder()
    module, _, name = source.partition(":")
    try:
        value = getattr(importlib.import_module(module), name)
    except Exception as error:
        raise _make_import_error(source, argument, error) from error
    if not callable(value):
        raise ValueError(f"{argument}: '{source}' is of type {type(value).__name__}, not a function without arguments")
    function: Callable[[], Any] = value
    return function


def check_returned_samples(samples: Any, input_signature: InputSignature, label: str) -> Any:
    """Check samples that a user's function returned.

    Of a ``DataLoader``, only the first sample is checked, after rebatching as in ``export``.

    Returns:
        the samples as a list, or the ``DataLoader``.

    Raises:
        ValueError: there are no samples, or one does not fit the program. The message names argument and function.
    """
    from torch.utils.data import DataLoader

    from arm_recipes.samples.call_inputs import as_inputs, rebatch
    from arm_recipes.samples.export_arguments import to_sample_list

    def normalize(values: Iterable[Any]) -> Iterator[Inputs]:
        for index, sample in enumerate(values):
            yield input_signature.without_labels(as_inputs(sample, f"{label}: samples[{index}]"))

    is_loader = isinstance(samples, DataLoader)
    if not is_loader:
        samples = to_sample_list("forward", samples, label)
    normalized = normalize(samples)
    checked = islice(rebatch(normalized, input_signature), 1) if is_loader else normalized
    index = -1
    for index, sample in enumerate(checked):
        input_signature.check(sample, f"{label}: samples[{index}]")
    if index < 0:
        raise ValueError(f"{label} returned no samples; return a list of samples, [(x,)]")
    return samples


def _call_function(function: Callable[[], Any], label: str) -> Any:
    """Call the user's function.

    Raises:
        ValueError: the function raised an exception, or returned None. The message names the function and the line.
    """
    try:
        samples = function()
    except Exception as error:
        raise ValueError(f"{label} failed: {_describe_error(error)}") from error
    if samples is None:
        raise ValueError(f"{label} returned None; return a list of samples, [(x,)]")
    return samples


def _read_file(
    file: Path, argument: str, input_infos: Sequence[TensorInfo], normalization: ImageNormalization
) -> list[tuple[Any, ...]]:
    """Read the samples of one file."""
    label = f"{argument}: '{file}'"
    if file.suffix.lower() in _IMAGE_SUFFIXES:
        if len(input_infos) != 1:
            raise ValueError(f"{label} is an image, but the model takes {len(input_infos)} inputs; give .npz files")
        columns = [_split_array(_load_image(file, input_infos[0], normalization, label), input_infos[0], label)]
    else:
        arrays = _load_arrays(file, input_infos, label)
        columns = [
            _split_array(array, input_info, label) for array, input_info in zip(arrays, input_infos, strict=True)
        ]
    counts = [len(column) for column in columns]
    if len(set(counts)) != 1:
        counts_text = ", ".join(
            f"{input_info.name}: {count}" for input_info, count in zip(input_infos, counts, strict=True)
        )
        raise ValueError(f"{label} has different numbers of samples ({counts_text})")
    return list(zip(*columns, strict=True))


def _load_arrays(file: Path, input_infos: Sequence[TensorInfo], label: str) -> list[Array]:
    """Load one array per input, by name; if the names differ, in order."""
    import numpy as np

    try:
        loaded = np.load(file, allow_pickle=False)
        arrays: Mapping[str, Array] = {"": loaded} if isinstance(loaded, np.ndarray) else dict(loaded)
    except (OSError, ValueError) as error:
        raise ValueError(f"{label} cannot be read as arrays: {error}") from error
    names = [input_info.name for input_info in input_infos]
    if set(names) <= set(arrays):
        return [arrays[name] for name in names]
    if len(arrays) == len(names):
        return list(arrays.values())
    raise ValueError(f"{label} has the arrays {', '.join(arrays) or 'none'}; the model takes {', '.join(names)}")


def _split_array(array: Array, input_info: TensorInfo, label: str) -> list[Any]:
    """Split an array into samples, as tensors of the input's dtype."""
    shape = tuple(input_info.shape)
    if _has_shape(array.shape, shape):
        pieces = [array]
    elif _has_shape((1, *array.shape), shape):
        pieces = [array[None]]
    elif _has_shape(array.shape[1:], shape) and len(array):
        pieces = list(array)
    elif shape and shape[0] != DYNAMIC_SIZE and _has_shape(array.shape[1:], shape[1:]) and len(array):
        pieces = list(_split_into_batches(array, shape[0]))
    else:
        raise ValueError(
            f"{label}: input '{input_info.name}' has the shape {list(shape)}, the array {list(array.shape)}"
        )
    return [_to_tensor(piece, input_info, label) for piece in pieces]


def _has_shape(actual: Sequence[int], expected: Sequence[int]) -> bool:
    return len(actual) == len(expected) and all(e in (a, DYNAMIC_SIZE) for a, e in zip(actual, expected, strict=True))


def _split_into_batches(array: Array, count: int) -> Iterator[Array]:
    import numpy as np

    for start in range(0, len(array), count):
        yield array.take(np.arange(start, start + count), axis=0, mode="wrap")


def _to_tensor(array: Array, input_info: TensorInfo, label: str) -> Any:
    """Convert an array to the input's dtype. Quantize float values for a quantized input.

    Raises:
        ValueError: array and input differ in kind (floating point, integer or boolean), or an integer does not fit the
            dtype.
    """
    import torch

    from arm_backend_core.scalar_kind import ScalarKind, kind_of

    tensor = torch.from_numpy(array.copy(order="C"))
    dtype: torch.dtype = getattr(torch, input_info.dtype)
    array_kind, input_kind = kind_of(tensor.dtype), kind_of(dtype)
    if array_kind is ScalarKind.FLOAT and input_info.scale is not None and input_kind is ScalarKind.INTEGER:
        return input_info.quantize(tensor)
    if array_kind is not input_kind:
        scaling = ", with the scaling used in training" if input_kind is ScalarKind.FLOAT else ""
        raise ValueError(
            f"{label}: input '{input_info.name}' takes {input_kind.value} values ({input_info.dtype}), the array has "
            f"{array.dtype}; convert it{scaling}"
        )
    if input_kind is ScalarKind.INTEGER and not torch.equal(tensor.to(dtype).to(tensor.dtype), tensor):
        raise ValueError(
            f"{label}: input '{input_info.name}' is {input_info.dtype}; the values of the array, from {array.min()} to "
            f"{array.max()}, do not fit"
        )
    return tensor.to(dtype)


def _load_image(file: Path, input_info: TensorInfo, normalization: ImageNormalization, label: str) -> Array:
    """Load an image for an input [N, C, H, W]: resize it to cover H x W, crop the center, normalize."""
    import numpy as np

    shape = input_info.shape
    if (
        len(shape) != 4
        or shape[1] not in (1, 3)
        or DYNAMIC_SIZE in shape[2:]
        or not input_info.dtype.startswith("float")
    ):
        raise ValueError(f"{label} is an image; the model takes {input_info}, not float [N, 1 or 3, height, width]")
    try:
        from PIL import Image, ImageOps, UnidentifiedImageError
    except ImportError as error:
        raise ValueError(
            f"{label}: Pillow, which reads images, is not installed: pip install 'arm-recipes[images]'"
        ) from error
    _, channels, height, width = input_info.shape
    for name, values in (("--mean", normalization.mean), ("--std", normalization.std)):
        if len(values) not in (1, channels):
            raise ValueError(f"{name} has {len(values)} numbers; the model's images have {channels} channels")
    try:
        with Image.open(file) as opened:
            upright = ImageOps.exif_transpose(opened).convert("RGB" if channels == 3 else "L")
    except (OSError, UnidentifiedImageError) as error:
        raise ValueError(f"{label} cannot be read as an image: {error}") from error
    resized = ImageOps.fit(upright, (width, height), Image.Resampling.BILINEAR)
    pixels = np.asarray(resized, np.float32).reshape(height, width, channels) / 255
    normalized = (pixels - np.asarray(normalization.mean, np.float32)) / np.asarray(normalization.std, np.float32)
    return np.ascontiguousarray(normalized.transpose(2, 0, 1)[None])
