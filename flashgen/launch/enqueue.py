"""Triton's launchers, and the C functions beneath them."""

import inspect
from collections.abc import Callable
from typing import Any


def enqueuer(loaded: Any, grid: int) -> tuple[Callable[[int, list[Any]], object], bool]:
    """(function that puts a loaded kernel on a stream, whether it takes encoded descriptors).

    Where Triton's C function is known (3.6 to 3.9) and the kernel needs no scratch memory, that is called; else Triton's launcher.
    """
    import triton
    from triton.runtime.driver import driver

    run, function, packed = loaded.run, loaded.function, loaded.packed_metadata
    release = tuple(int(part) for part in triton.__version__.split(".")[:2])
    if run.global_scratch_size or run.profile_scratch_size or getattr(run, "gsan_enabled", False) or release > (3, 9):

        def through_triton(stream: int, arguments: list[Any]) -> None:
            run(grid, 1, 1, stream, function, packed, None, None, None, *arguments)

        return through_triton, False

    cooperative, dependent = run.launch_cooperative_grid, run.launch_pdl
    if release >= (3, 7):  # one C function for all kernels; what it needs to know of the parameters is passed to it
        launch = driver.active.utils.launch
        annotations, signature = run.arg_annotations, run.kernel_signature

        def shared(stream: int, arguments: list[Any]) -> None:
            head = (grid, 1, 1, stream, function, cooperative, dependent, packed, None, None, None, None, None)
            launch(*head, annotations, signature, arguments)

        return shared, True

    # A C function of its own for each signature, inside a Python one where there are descriptors.
    own = run.launch
    if inspect.isfunction(own):
        own = inspect.getclosurevars(own).nonlocals["launcher"]

    def single(stream: int, arguments: list[Any]) -> None:
        own(grid, 1, 1, stream, function, cooperative, dependent, None, None, packed, None, None, None, *arguments)

    return single, True
