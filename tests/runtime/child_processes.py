"""Functions that tests run in child processes, and the functions that start these.

A process has one Vulkan loader, one plugin and one set of backends, and some of these tests crash it on purpose. A fork
server that has already done the slow imports starts the processes. This module has no slow imports.
"""

from __future__ import annotations

import ctypes
import itertools
import multiprocessing
import os
import signal
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(
    [
        "arm_recipes.runtime.program",
        "executorch.kernels.quantized",
        "executorch.runtime",
        "tests.runtime.child_processes",
    ]
)
#: Timeout of a child process. Some compile C++ while other tests run.
_TIMEOUT_SECONDS = 300.0


class ChildDied(AssertionError):
    """The child process ended before it returned a result.

    Attributes:
        code: exit code of the process, or the negative number of a signal.
    """

    def __init__(self, code: int | None) -> None:
        super().__init__(f"the process ended with {code}")
        self.code = code


def run_in_child(
    function: Callable[..., Any],
    *arguments: Any,
    environment: Mapping[str, str | None] | None = None,
    without: Sequence[str] = (),
) -> Any:
    """Call ``function`` in a new process and return its result. Its exceptions are raised in this process.

    Args:
        environment: changes of environment variables; None removes a variable.
        without: modules that cannot be imported in the child process.

    Raises:
        ChildDied: the process crashed or reached the timeout.
    """
    answer = start_in_child(function, *arguments, environment=environment, without=without)
    return answer()


def start_in_child(
    function: Callable[..., Any],
    *arguments: Any,
    environment: Mapping[str, str | None] | None = None,
    without: Sequence[str] = (),
) -> Callable[[], Any]:
    """Start ``function`` in a new process. Returns a function that waits for the result, as ``run_in_child`` does."""
    here, there = _CONTEXT.Pipe(duplex=False)
    process = _CONTEXT.Process(target=_run_child, args=(there, dict(environment or {}), without, function, arguments))
    process.start()
    there.close()

    def answer() -> Any:
        value: Any
        try:
            failed, value = here.recv() if here.poll(_TIMEOUT_SECONDS) else (False, None)
        except EOFError:
            process.join()
            raise ChildDied(process.exitcode) from None
        finally:
            here.close()
        process.join(_TIMEOUT_SECONDS)
        if process.exitcode != 0:
            process.kill()
            raise ChildDied(process.exitcode)
        if failed:
            raise value
        return value

    return answer


def _run_child(
    answer: Connection,
    environment: Mapping[str, str | None],
    without: Sequence[str],
    function: Callable[..., Any],
    arguments: Sequence[Any],
) -> None:
    for name, value in environment.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    for name in without:
        sys.modules[name] = None  # type: ignore[assignment]
    try:
        answer.send((False, function(*arguments)))
    except Exception as error:
        error.add_note("in the child: " + traceback.format_exc())
        answer.send((True, error))


# -- functions for child processes


def run(program: bytes, *tensors: Any, times: int = 1) -> list[Any]:
    """Run a program and return its outputs as numpy arrays."""
    from arm_recipes import load

    loaded = load(program)
    for _ in range(times):
        outputs = loaded.execute(*tensors)
    return [output.numpy() for output in outputs]


def run_each(programs: Sequence[bytes], tensors: Sequence[Any], answer: Connection) -> None:
    """Run each program, and send its number with its outputs or the exception's class and text.

    A damaged program may crash the process. It is then the program after the last number that was sent.
    """
    import resource

    from arm_recipes import load

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with open(os.devnull, "wb") as null:  # the runtime prints many messages about damaged programs
        os.dup2(null.fileno(), 1)
        os.dup2(null.fileno(), 2)
    for number, program in enumerate(programs):
        try:
            answer.send((number, [output.numpy() for output in load(program).execute(*tensors)]))
        except Exception as error:
            answer.send((number, f"{type(error).__name__}: {error}"))


def run_programs(programs: Sequence[bytes], *tensors: Any) -> list[list[Any] | str]:
    """Run each program; return its outputs, the exception's class and text, or ``crash`` and the exit code."""
    found: list[list[Any] | str] = []
    while len(found) < len(programs):
        here, there = _CONTEXT.Pipe(duplex=False)
        process = _CONTEXT.Process(target=run_each, args=(programs[len(found) :], tensors, there))
        process.start()
        there.close()
        try:
            while here.poll(_TIMEOUT_SECONDS):
                found.append(here.recv()[1])
        except EOFError:
            pass
        here.close()
        if len(found) < len(programs) and process.is_alive():
            process.join(1)
            process.kill()
        process.join()
        if process.exitcode != 0:
            found.append(f"crash {process.exitcode}")
    return found


def find_vulkan_loader() -> tuple[str, bool, dict[str, str | None]]:
    """Return the chosen Vulkan loader, whether the emulation layer is used, and the Vulkan variables afterwards."""
    from arm_recipes.runtime.vulkan import set_up_vulkan

    chosen = set_up_vulkan()
    variables = ("VK_LAYER_PATH", "VK_INSTANCE_LAYERS", "VK_DRIVER_FILES")
    return chosen.loader, chosen.emulated, {name: os.environ.get(name) for name in variables}


def run_after_failure(failing: bytes, working: bytes, *tensors: Any) -> tuple[list[str], list[Any]]:
    """Run a failing program twice, then another one; return the two messages and the outputs of the last run."""
    from arm_recipes import RunError, load

    messages = []
    program = load(failing)
    for _ in range(2):
        try:
            program.execute(*tensors)
        except RunError as error:
            messages.append(f"{type(error).__name__} from {type(error.__cause__).__name__}: {error}")
    return messages, run(working, *tensors)


def run_with_loaders(loaders: Sequence[str], program: bytes, *tensors: Any) -> tuple[str, list[Any]]:
    """Run with these candidate Vulkan loaders; return the chosen loader and the outputs."""
    from arm_recipes.runtime import vulkan as module

    module._DEFAULT_LOADERS = tuple(loaders)  # type: ignore[assignment]
    outputs = run(program, *tensors)
    return module.set_up_vulkan().loader, outputs


def run_without_layer_library(folder: str, program: bytes, *tensors: Any) -> list[Any]:
    """Run with an installed emulation layer whose libraries are missing."""
    import emulation_layer.cli as cli

    paths = cli.get_deploy_paths()
    cli.get_deploy_paths = lambda: {**paths, "LD_LIBRARY_PATH": folder}
    return run(program, *tensors)


def install_copies_then_plugin(libraries: Sequence[str], times: int = 1) -> list[str]:
    """Install copies of the plugin one after the other, then the plugin itself; return the message of each copy."""
    import executorch.extension.pybindings.portable_lib  # noqa: F401

    messages = []
    for library in libraries:
        message = ctypes.create_string_buffer(512)
        failed = ctypes.CDLL(library).arm_host_install(message, ctypes.c_uint64(len(message)))
        messages.append(message.value.decode() if failed else "")
    from arm_recipes.runtime import host_backends

    for _ in range(times):
        host_backends.register_backends()
    return messages


def install_plugin_then_copy_twice(library: str, program: bytes, *tensors: Any) -> tuple[list[str], list[Any]]:
    """Install a copy of the plugin twice after the plugin; return the messages and the outputs of a program."""
    install_copies_then_plugin([])
    messages = [install_copies_then_plugin([library])[0] for _ in range(2)]
    return messages, run(program, *tensors)


def build_and_run(program: bytes, *tensors: Any) -> tuple[str, list[Any]]:
    """Return the path of the plugin, and the outputs of a program that it runs. The plugin is not optimized."""
    from arm_recipes.runtime import build

    build._COMPILER_FLAGS = tuple("-O0" if flag == "-O3" else flag for flag in build._COMPILER_FLAGS)  # type: ignore[assignment]  # builds faster
    outputs = run(program, *tensors)
    return str(build.build_plugin()), outputs


def export_and_run() -> tuple[int, str]:
    """Export a program and run it; return its size and the message of the run."""
    import torch
    from executorch.export import ExportRecipe

    from arm_recipes import ArmRecipeType, RunError, export

    x = torch.ones(1, 4)
    recipe = ExportRecipe.get_recipe(ArmRecipeType.TOSA_FP)
    result = export(torch.nn.Linear(4, 2).eval(), recipe, [(x,)], progress=False)
    try:
        result.run(x)
    except RunError as error:
        return len(result.buffer), str(error)
    return len(result.buffer), ""


def interrupt_run(program: bytes, *tensors: Any) -> tuple[str, list[Any]]:
    """Interrupt a run by Ctrl-C; return the exception and the outputs of the next run."""
    from arm_backend_core.tosa import reference_model
    from arm_recipes import load

    original, loaded = reference_model.run, load(program)

    def interrupted_run(*_: Any) -> Any:
        os.kill(os.getpid(), signal.SIGINT)
        return original(*_)

    signal.signal(signal.SIGINT, signal.default_int_handler)
    reference_model.run = interrupted_run  # type: ignore[assignment]
    try:
        loaded.execute(*tensors)
    except BaseException as error:
        raised = type(error).__name__
    reference_model.run = original
    return raised, [output.numpy() for output in loaded.execute(*tensors)]


def run_in_threads(
    jobs: Sequence[tuple[Sequence[bytes], Sequence[Sequence[Any]]]], shared: bool = False
) -> list[list[Any]]:
    """Run all jobs at the same time, each in its own thread. A job has programs and the inputs of each of their runs.

    Args:
        shared: equal jobs use one loaded program.

    Returns:
        for each job the outputs of each run of each of its programs.
    """
    import threading

    from arm_recipes import load

    loaded: dict[bytes, Any] = {}
    if shared:
        loaded = {program: load(program) for programs, _ in jobs for program in programs}
    results: list[list[Any]] = [[] for _ in jobs]
    barrier = threading.Barrier(len(jobs))

    def work(number: int) -> None:
        programs, samples = jobs[number]
        mine = [loaded.get(program) or load(program) for program in programs]
        barrier.wait()
        for sample, program in itertools.product(samples, mine):
            results[number].append([output.numpy() for output in program.execute(*sample)])

    threads = [threading.Thread(target=work, args=(number,)) for number in range(len(jobs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def destroy_while_running(program: bytes, other: bytes, tensors: Sequence[Any], times: int) -> list[Any]:
    """Run a program while another thread loads, runs and deletes programs; return the outputs of every run."""
    import threading

    from arm_recipes import load

    done = threading.Event()
    dropped = []

    def churn() -> None:
        while not done.is_set():
            dropped.append([output.numpy() for output in load(other).execute(*tensors)])

    thread = threading.Thread(target=churn, daemon=True)
    thread.start()
    kept = load(program)
    outputs = [[output.numpy() for output in kept.execute(*tensors)] for _ in range(times)]
    while not dropped and thread.is_alive():
        outputs.append([output.numpy() for output in kept.execute(*tensors)])
    done.set()
    thread.join()
    return outputs + dropped


def count_lines_printed_while_running(program: bytes, tensors: Sequence[Any], lines: int) -> int:
    """Print lines in one thread while another runs a program; return how many lines arrive."""
    import tempfile
    import threading

    from arm_recipes import load

    loaded = load(program)
    loaded.execute(*tensors)
    with tempfile.TemporaryFile() as file:
        os.dup2(file.fileno(), 1)
        done = threading.Event()

        def busy() -> None:
            while not done.is_set():
                loaded.execute(*tensors)

        thread = threading.Thread(target=busy, daemon=True)
        thread.start()
        for number in range(lines):
            os.write(1, f"{number}\n".encode())
        done.set()
        thread.join()
        file.seek(0)
        return len(file.read().splitlines())


def crash() -> None:
    """Crash by reading an invalid address."""
    import resource

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    ctypes.string_at(0)
