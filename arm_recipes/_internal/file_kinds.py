"""File type detection: describe a file that ``torch.export.save`` did not write, and how to convert it."""

from __future__ import annotations

import pickletools
import zipfile
from collections.abc import Iterator
from pathlib import Path

#: Python call that writes a model file for ``export``.
_SAVE_CALL = "torch.export.save(torch.export.export(model.eval(), example_inputs), 'model.pt2')"
#: {file suffix: description of the file and what to do}, as the end of a message.
_FORMATS = {
    ".onnx": f"an ONNX model; start from the PyTorch model that it was converted from: {_SAVE_CALL}",
    ".tflite": f"a LiteRT model; start from the PyTorch model that it was converted from: {_SAVE_CALL}",
    ".safetensors": f"weights alone; build the model, load them into it, then call {_SAVE_CALL}",
    ".pte": f"an already compiled program (see arm-recipes run, inspect); compile from PyTorch: {_SAVE_CALL}",
    ".py": f"Python source; call this in it, or in a notebook: {_SAVE_CALL}",
}
#: Maximum number of pickle opcodes to read: enough to find the first class of a pickled module or dict.
_MAX_OPCODES = 64


#: Description of a file that ``torch.save`` wrote from a state dict, and what to do.
STATE_DICT = "weights alone (a state dict); build the model, and call model.load_state_dict(...)"


def is_saved_program(names: list[str]) -> bool:
    """Whether an archive with these entries was written by ``torch.export.save``."""
    # Archives of PyTorch 2.7 and earlier have a "version" entry, later archives an "archive_format" entry.
    return "version" in names or any(name.endswith("/archive_format") for name in names)


def describe_uncompiled_file(path: Path) -> str | None:
    """Describe a file that was passed as a compiled program but is not one, and what to do.

    Returns:
        the description; None for ``.pte``, ``.tflite`` and unknown types.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            if is_saved_program(archive.namelist()):
                return "a model saved by torch.export.save; compile it: arm_recipes.export(path, recipe)"
    except (OSError, zipfile.BadZipFile):
        pass
    return None if path.suffix.lower() in (".pte", ".tflite") else describe_file(path)


def describe_file(path: Path) -> str | None:
    """Describe a file that was passed as a model but not written by ``torch.export.save``, and what to do.

    The file is not unpickled: unpickling would execute its content and import PyTorch.

    Returns:
        the description; None for unknown types.
    """
    description = _FORMATS.get(path.suffix.lower())
    if description is not None:
        return description
    try:
        with zipfile.ZipFile(path) as archive:
            names = archive.namelist()
            if any("/code/" in name for name in names) and any(name.endswith("/constants.pkl") for name in names):
                return f"a TorchScript archive; start from the module that it was created from: {_SAVE_CALL}"
            pickles = [name for name in names if name.endswith("/data.pkl")]
            first_class = next(_pickled_classes(archive.read(pickles[0])), "") if pickles else ""
    except (OSError, zipfile.BadZipFile, ValueError):
        return None
    if not pickles:
        return None
    if first_class == "collections OrderedDict" or not first_class or first_class.startswith("torch._utils"):
        return f"{STATE_DICT.replace('...', 'torch.load(...)')}, then {_SAVE_CALL}"
    return (
        f"a pickled object of the class {first_class.replace(' ', '.')} (torch.save); where its class can be imported, "
        f"run model = torch.load(..., weights_only=False), then call {_SAVE_CALL}"
    )


def _pickled_classes(pickle: bytes) -> Iterator[str]:
    """Yield the classes that the first opcodes of a pickle name, in order, each as "module class"."""
    strings: list[str] = []
    for count, (opcode, argument, _) in enumerate(pickletools.genops(pickle)):
        if count > _MAX_OPCODES:
            return
        if opcode.name == "GLOBAL":
            yield str(argument)
        elif opcode.name == "STACK_GLOBAL":
            yield " ".join(strings[-2:])
        elif isinstance(argument, str):
            strings.append(argument)
