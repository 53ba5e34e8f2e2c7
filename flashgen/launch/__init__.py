"""Kernel + tensors -> enqueued: the one launch path that check, bench and dispatch share.

    forward      prepare: a forward Kernel and tensors -> Launch
    backward     prepare_backward: a backward Kernel, whose functions are launched one after another, and tensors -> BackwardLaunch
    tensors      what a problem says of its tensors, and what a kernel needs of them
    schedules    what each program of a hopper kernel does
    descriptors  TMA descriptors, encoded once for each address
    enqueue      Triton's launchers

`prepare` binds everything that the shapes and strides decide; a call of the Launch it gives then only fills in addresses and the
scale. Triton's own launcher looks at every argument again on each call and encodes every TMA descriptor anew; a Launch calls
the C function beneath it, with descriptors kept by address.
"""

from flashgen.launch.backward import BackwardInputs, BackwardLaunch, bind_backward, prepare_backward
from flashgen.launch.descriptors import KEPT_MAPS
from flashgen.launch.forward import InterpretedLaunch, Launch, bind, prepare
from flashgen.launch.tensors import MAX_BLOCK, needs_wide_offsets

__all__ = [
    "KEPT_MAPS",
    "MAX_BLOCK",
    "BackwardInputs",
    "BackwardLaunch",
    "InterpretedLaunch",
    "Launch",
    "bind",
    "bind_backward",
    "needs_wide_offsets",
    "prepare",
    "prepare_backward",
]
