"""Vulkan set-up for data graphs: use a driver with Arm's ML extensions, or add Arm's emulation layer to another driver.

The Vulkan loader reads its settings from the environment. All libraries use the loader that the process loads first.
This module therefore chooses the loader and sets the environment once, before any other Vulkan call of this package.
"""

from __future__ import annotations

import ctypes
import os
from dataclasses import dataclass
from pathlib import Path

from arm_recipes.runtime.errors import RuntimeUnavailable
from arm_recipes.runtime.lazy import once

#: Oldest version of the loader that works with the emulation layer (1.3.239 fails to create a device).
_MIN_LOADER_VERSION = (1, 4)
#: Environment variable with the path of the loader.
LOADER_VARIABLE = "ARM_RECIPES_VULKAN_LOADER"
#: Paths of loaders to try, in order: the system's loader, and the loader of Debian's package chromium-common.
_DEFAULT_LOADERS = ("libvulkan.so.1", "/usr/lib/chromium/libvulkan.so.1")
_REQUIRED_EXTENSIONS = {b"VK_ARM_tensors", b"VK_ARM_data_graph"}
_EMULATION_LAYERS = "VK_LAYER_ML_Graph_Emulation:VK_LAYER_ML_Tensor_Emulation"
_LAYER_LIBRARIES = ("libVkLayer_Tensor.so", "libVkLayer_Graph.so")
_INSTALL_HINT = (
    "Install Mesa's CPU driver and a Vulkan loader of at least version 1.4 (Debian 12: apt-get install "
    f"mesa-vulkan-drivers chromium-common), or name a loader in {LOADER_VARIABLE}. "
    "The TOSA graph runs without Vulkan: run(..., backend='tosa')."
)


class _ApplicationInfo(ctypes.Structure):
    _fields_ = (
        ("sType", ctypes.c_int32),
        ("pNext", ctypes.c_void_p),
        ("pApplicationName", ctypes.c_char_p),
        ("applicationVersion", ctypes.c_uint32),
        ("pEngineName", ctypes.c_char_p),
        ("engineVersion", ctypes.c_uint32),
        ("apiVersion", ctypes.c_uint32),
    )


class _InstanceCreateInfo(ctypes.Structure):
    _fields_ = (
        ("sType", ctypes.c_int32),
        ("pNext", ctypes.c_void_p),
        ("flags", ctypes.c_uint32),
        ("pApplicationInfo", ctypes.POINTER(_ApplicationInfo)),
        ("enabledLayerCount", ctypes.c_uint32),
        ("ppEnabledLayerNames", ctypes.c_void_p),
        ("enabledExtensionCount", ctypes.c_uint32),
        ("ppEnabledExtensionNames", ctypes.c_void_p),
    )


class _ExtensionProperties(ctypes.Structure):
    _fields_ = (("extensionName", ctypes.c_char * 256), ("specVersion", ctypes.c_uint32))


@dataclass(frozen=True)
class Vulkan:
    """The Vulkan implementation that this process uses.

    Attributes:
        loader: path of the Vulkan loader.
        emulated: whether Arm's emulation layer provides the extensions.
    """

    loader: str
    emulated: bool

    def __str__(self) -> str:
        return "Arm's emulation layer" if self.emulated else "a driver with Arm's ML extensions"


@once
def set_up_vulkan() -> Vulkan:
    """Choose the loader for this process, and check the driver. Later calls return the same choice.

    Raises:
        RuntimeUnavailable: there is no recent loader or no driver, or the driver needs the emulation layer, which is
            missing.
    """
    path, loader = _load_loader()
    devices = _device_extensions(loader)
    if any(extensions >= _REQUIRED_EXTENSIONS for extensions in devices):
        return Vulkan(path, emulated=False)
    if not devices:
        raise RuntimeUnavailable(f"The Vulkan loader '{path}' finds no driver. {_INSTALL_HINT}")
    _enable_emulation_layer()
    return Vulkan(path, emulated=True)


def _load_loader() -> tuple[str, ctypes.CDLL]:
    """Load the first loader of a sufficient version. Its symbols become global: libraries loaded later use them."""
    user_path = os.environ.get(LOADER_VARIABLE)
    rejections = []
    for path in [user_path] if user_path else _DEFAULT_LOADERS:
        try:
            library = ctypes.CDLL(path, ctypes.RTLD_GLOBAL)
        except OSError as error:
            rejections.append(str(error))
            continue
        version = _loader_version(library)
        if version >= _MIN_LOADER_VERSION:
            return path, library
        rejections.append(f"{path} has version {'.'.join(map(str, version))}")
        _unload(library)  # otherwise, dlopen may return this library for a later path of the same name
    raise RuntimeUnavailable(f"There is no usable Vulkan loader: {'; '.join(rejections)}. {_INSTALL_HINT}")


def _loader_version(loader: ctypes.CDLL) -> tuple[int, int, int]:
    number = ctypes.c_uint32()
    if not hasattr(loader, "vkEnumerateInstanceVersion"):  # new in Vulkan 1.1
        return 1, 0, 0
    if loader.vkEnumerateInstanceVersion(ctypes.byref(number)) != 0:
        return 0, 0, 0
    return (number.value >> 22) & 0x7F, (number.value >> 12) & 0x3FF, number.value & 0xFFF


def _unload(library: ctypes.CDLL) -> None:
    import _ctypes

    _ctypes.dlclose(library._handle)


def _device_extensions(loader: ctypes.CDLL) -> list[set[bytes]]:
    """List the extensions of each Vulkan device on this machine."""
    application = _ApplicationInfo(sType=0, apiVersion=(1 << 22) | (3 << 12))
    request = _InstanceCreateInfo(sType=1, pApplicationInfo=ctypes.pointer(application))
    instance, count = ctypes.c_void_p(), ctypes.c_uint32()
    if loader.vkCreateInstance(ctypes.byref(request), None, ctypes.byref(instance)) != 0:
        return []
    try:
        loader.vkEnumeratePhysicalDevices(instance, ctypes.byref(count), None)
        devices = (ctypes.c_void_p * count.value)()
        loader.vkEnumeratePhysicalDevices(instance, ctypes.byref(count), devices)
        return [_list_extensions(loader, ctypes.c_void_p(device)) for device in devices[: count.value]]
    finally:
        loader.vkDestroyInstance(instance, None)


def _list_extensions(loader: ctypes.CDLL, device: ctypes.c_void_p) -> set[bytes]:
    count = ctypes.c_uint32()
    loader.vkEnumerateDeviceExtensionProperties(device, None, ctypes.byref(count), None)
    properties = (_ExtensionProperties * count.value)()
    loader.vkEnumerateDeviceExtensionProperties(device, None, ctypes.byref(count), properties)
    return {extension.extensionName for extension in properties[: count.value]}


def _enable_emulation_layer() -> None:
    """Enable Arm's emulation layer for every Vulkan instance of this process."""
    try:
        from emulation_layer.cli import get_deploy_paths
    except ImportError:
        raise RuntimeUnavailable(
            "No Vulkan driver here has Arm's ML extensions, and the emulation layer is not installed. "
            "Install it (ai-ml-emulation-layer-for-vulkan) with: pip install 'arm-recipes[vgf]'"
        ) from None
    paths = get_deploy_paths()
    _prepend("VK_LAYER_PATH", paths["VK_LAYER_PATH"])
    _prepend("VK_INSTANCE_LAYERS", _EMULATION_LAYERS)
    folders = paths["LD_LIBRARY_PATH"].split(os.pathsep)
    for name in _LAYER_LIBRARIES:
        # The layer manifests name the libraries without a folder. Load them here, so that dlopen finds them by name.
        library = next((Path(folder) / name for folder in folders if (Path(folder) / name).exists()), None)
        if library is None:
            raise RuntimeUnavailable(f"The emulation layer is installed without '{name}': install it again")
        ctypes.CDLL(str(library), ctypes.RTLD_GLOBAL)


def _prepend(variable: str, value: str) -> None:
    existing = os.environ.get(variable)
    os.environ[variable] = os.pathsep.join([value, *([existing] if existing else [])])
