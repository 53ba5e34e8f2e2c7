"""Every error that flashgen raises on purpose.

    FlashgenError
    ├── ArgumentError (ValueError)               an argument cannot be right; the message names it and what it was
    ├── ArgumentTypeError (TypeError)            an argument has a wrong or mixed type, dtype or device
    ├── UnsupportedError (NotImplementedError)   a sound request for something that flashgen does not compute
    ├── IllegalCandidateError (ValueError)       a candidate breaks a named constraint of the space
    ├── BuildError (RuntimeError)                a kernel did not compile
    │   ├── OutOfResourcesError                  it needs more shared memory, registers or threads than the device has
    │   └── BuildTimeoutError                    the compiler did not come back in time
    ├── LaunchError (RuntimeError)               the driver refused a kernel, or the device failed while running it
    ├── DatabaseError (RuntimeError)             a database cannot be read or written
    ├── ProfilerError (RuntimeError)             the device's counters cannot be read here
    └── NoWinnerError (RuntimeError)             a search ended without one right and measured candidate

Each also derives from the built-in error that a Python user would expect. Messages are one sentence.
"""


class FlashgenError(Exception):
    """Base of every error that flashgen raises on purpose."""


class ArgumentError(FlashgenError, ValueError):
    """An argument cannot be right."""


class ArgumentTypeError(FlashgenError, TypeError):
    """An argument has a wrong or mixed type, dtype or device."""


class UnsupportedError(FlashgenError, NotImplementedError):
    """A sound request for something that flashgen does not compute."""


class IllegalCandidateError(FlashgenError, ValueError):
    """A candidate breaks a named constraint of the space."""


class BuildError(FlashgenError, RuntimeError):
    """A kernel did not compile."""


class OutOfResourcesError(BuildError):
    """A kernel needs more shared memory, registers or threads than the device has."""


class BuildTimeoutError(BuildError):
    """The compiler did not come back in time."""


class LaunchError(FlashgenError, RuntimeError):
    """The driver refused a kernel, or the device failed while running it."""


class DatabaseError(FlashgenError, RuntimeError):
    """A database cannot be read or written."""


class ProfilerError(FlashgenError, RuntimeError):
    """The device's counters cannot be read here."""


class NoWinnerError(FlashgenError, RuntimeError):
    """A search ended without one right and measured candidate."""
