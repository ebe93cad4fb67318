"""The emulator, with which operators are executed as Vela compiles them."""

from tests.runtime.conftest import accelerators, emulator

__all__ = ["accelerators", "emulator"]
