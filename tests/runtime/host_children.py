"""Functions that tests run in a process of their own, and how.

A process has one Vulkan, one plugin and one set of backends, and some of these tests are meant to break it. A server
that has the slow imports behind it forks each process. This module imports nothing that takes long.
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
    ["arm_recipes.runtime.program", "executorch.kernels.quantized", "executorch.runtime", "tests.runtime.host_children"]
)
_SECONDS = 60.0


class ChildDied(AssertionError):
    """The process ended before it had an answer.

    Attributes:
        code: its exit code, or the negative number of a signal.
    """

    def __init__(self, code: int | None) -> None:
        super().__init__(f"the process ended with {code}")
        self.code = code


def in_child(
    function: Callable[..., Any],
    *arguments: Any,
    environment: Mapping[str, str | None] | None = None,
    without: Sequence[str] = (),
) -> Any:
    """What ``function`` returns in a fresh process; its exceptions are raised here.

    Args:
        environment: changes; None removes a variable.
        without: modules that cannot be imported there.

    Raises:
        ChildDied: it crashed, or took too long.
    """
    answer = start(function, *arguments, environment=environment, without=without)
    return answer()


def start(
    function: Callable[..., Any],
    *arguments: Any,
    environment: Mapping[str, str | None] | None = None,
    without: Sequence[str] = (),
) -> Callable[[], Any]:
    """Like ``in_child``, which returns at once: what it returns waits for the answer."""
    here, there = _CONTEXT.Pipe(duplex=False)
    process = _CONTEXT.Process(target=_child, args=(there, dict(environment or {}), without, function, arguments))
    process.start()
    there.close()

    def answer() -> Any:
        value: Any
        try:
            failed, value = here.recv() if here.poll(_SECONDS) else (False, None)
        except EOFError:
            process.join()
            raise ChildDied(process.exitcode) from None
        finally:
            here.close()
        process.join(_SECONDS)
        if process.exitcode != 0:
            process.kill()
            raise ChildDied(process.exitcode)
        if failed:
            raise value
        return value

    return answer


def _child(
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


# -- what runs there


def run(program: bytes, *tensors: Any, times: int = 1) -> list[Any]:
    """The outputs of a program as numpy arrays."""
    from arm_recipes import load

    loaded = load(program)
    for _ in range(times):
        outputs = loaded.execute(*tensors)
    return [output.numpy() for output in outputs]


def run_each(programs: Sequence[bytes], tensors: Sequence[Any], answer: Connection) -> None:
    """For each program, send its number and what became of running it: its outputs, or the exception's class and text.

    A damaged program may crash the process; the one after the last number sent is to blame.
    """
    import resource

    from arm_recipes import load

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with open(os.devnull, "wb") as null:  # the runtime has much to say about damaged programs
        os.dup2(null.fileno(), 1)
        os.dup2(null.fileno(), 2)
    for number, program in enumerate(programs):
        try:
            answer.send((number, [output.numpy() for output in load(program).execute(*tensors)]))
        except Exception as error:
            answer.send((number, f"{type(error).__name__}: {error}"))


def fates(programs: Sequence[bytes], *tensors: Any) -> list[list[Any] | str]:
    """What becomes of running each program: its outputs, the exception's class and text, or ``crash`` and a number."""
    found: list[list[Any] | str] = []
    while len(found) < len(programs):
        here, there = _CONTEXT.Pipe(duplex=False)
        process = _CONTEXT.Process(target=run_each, args=(programs[len(found) :], tensors, there))
        process.start()
        there.close()
        try:
            while here.poll(_SECONDS):
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


def vulkan() -> tuple[str, bool, dict[str, str | None]]:
    """The Vulkan loader that is chosen, whether the emulation layer is used, and what the environment is then."""
    from arm_recipes.runtime.vulkan import set_up_vulkan

    chosen = set_up_vulkan()
    variables = ("VK_LAYER_PATH", "VK_INSTANCE_LAYERS", "VK_DRIVER_FILES")
    return chosen.loader, chosen.emulated, {name: os.environ.get(name) for name in variables}


def run_after_failure(fails: bytes, works: bytes, *tensors: Any) -> tuple[list[str], list[Any]]:
    """What two runs of a program say, and the outputs of another one afterwards."""
    from arm_recipes import RunError, load

    said = []
    program = load(fails)
    for _ in range(2):
        try:
            program.execute(*tensors)
        except RunError as error:
            said.append(f"{type(error).__name__} from {type(error.__cause__).__name__}: {error}")
    return said, run(works, *tensors)


def run_with_loaders(loaders: Sequence[str], program: bytes, *tensors: Any) -> tuple[str, list[Any]]:
    """Run with these Vulkan loaders to choose from; the one that was chosen, and the outputs."""
    from arm_recipes.runtime import vulkan as module

    module._DEFAULT_LOADERS = tuple(loaders)  # type: ignore[assignment]
    outputs = run(program, *tensors)
    return module.set_up_vulkan().loader, outputs


def run_without_layer_library(folder: str, program: bytes, *tensors: Any) -> list[Any]:
    """Run where the emulation layer is installed without its libraries."""
    import emulation_layer.cli as cli

    paths = cli.get_deploy_paths()
    cli.get_deploy_paths = lambda: {**paths, "LD_LIBRARY_PATH": folder}
    return run(program, *tensors)


def install_after(libraries: Sequence[str], times: int = 1) -> list[str]:
    """Install copies of the plugin one after the other, then the plugin itself; what each copy said, if anything."""
    import executorch.extension.pybindings.portable_lib  # noqa: F401

    said = []
    for library in libraries:
        message = ctypes.create_string_buffer(512)
        failed = ctypes.CDLL(library).arm_host_install(message, ctypes.c_uint64(len(message)))
        said.append(message.value.decode() if failed else "")
    from arm_recipes.runtime import plugin

    for _ in range(times):
        plugin.register_backends()
    return said


def copies_after_install(library: str, program: bytes, *tensors: Any) -> tuple[list[str], list[Any]]:
    """What a copy of the plugin says to being installed twice after the plugin, and whether programs still run."""
    install_after([])
    said = [install_after([library])[0] for _ in range(2)]
    return said, run(program, *tensors)


def build_and_run(program: bytes, *tensors: Any) -> tuple[str, list[Any]]:
    """Where the plugin is, and what it runs."""
    from arm_recipes.runtime import build

    outputs = run(program, *tensors)
    return str(build.build_plugin()), outputs


def export_and_run() -> tuple[int, str]:
    """Size of a program that is exported, and what is said when it is run."""
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


def interrupted(program: bytes, *tensors: Any) -> tuple[str, list[Any]]:
    """What Ctrl-C during a run raises, and the outputs of the next run."""
    from arm_backend_core.tosa import reference
    from arm_recipes import load

    original, loaded = reference.run, load(program)

    def pressed(*_: Any) -> Any:
        os.kill(os.getpid(), signal.SIGINT)
        return original(*_)

    signal.signal(signal.SIGINT, signal.default_int_handler)
    reference.run = pressed  # type: ignore[assignment]
    try:
        loaded.execute(*tensors)
    except BaseException as error:
        raised = type(error).__name__
    reference.run = original
    return raised, [output.numpy() for output in loaded.execute(*tensors)]


def in_threads(
    jobs: Sequence[tuple[Sequence[bytes], Sequence[Sequence[Any]]]], shared: bool = False
) -> list[list[Any]]:
    """Run each job in a thread of its own, all at once: programs, and the inputs of each of their runs.

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
    together = threading.Barrier(len(jobs))

    def work(number: int) -> None:
        programs, samples = jobs[number]
        mine = [loaded.get(program) or load(program) for program in programs]
        together.wait()
        for sample, program in itertools.product(samples, mine):
            results[number].append([output.numpy() for output in program.execute(*sample)])

    threads = [threading.Thread(target=work, args=(number,)) for number in range(len(jobs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def destroy_while_running(program: bytes, other: bytes, tensors: Sequence[Any], times: int) -> list[Any]:
    """Run a program while another thread loads, runs and drops others; the outputs of every run."""
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


def prints_while_running(program: bytes, tensors: Sequence[Any], lines: int) -> int:
    """How many of the lines that one thread prints arrive while another one runs a program."""
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
    """Read from where there is nothing."""
    import resource

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    ctypes.string_at(0)
