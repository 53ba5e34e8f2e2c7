"""Source -> imported module: where generated modules live on disk, and how they become Python.

A module is compiled from the text in memory; its file is for readers, debuggers and profilers. So a file that another process
truncates, replaces or deletes can change nothing, and where no folder can be written the module still works.
"""

import functools
import hashlib
import importlib.abc
import importlib.util
import logging
import os
import stat
import sys
import tempfile
import threading
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import platformdirs

from flashgen.render import Source

_log = logging.getLogger(__name__)
_lock = threading.Lock()
_modules: dict[str, ModuleType] = {}


@dataclass(frozen=True, kw_only=True)
class CacheInfo:
    """What caches hold: generated modules, and the compiled kernels that Triton keeps (also those of other programs)."""

    modules_path: Path
    modules: int
    modules_bytes: int
    compiled_path: Path
    compiled: int
    compiled_bytes: int


def load(source: Source) -> ModuleType:
    """The imported module of a source; equal texts share one module.

    Its name holds a hash of the text, so two versions of a variant live side by side and no file is ever changed in place.
    """
    name = f"flashgen_{source.variant.name}_{hashlib.sha256(source.text.encode()).hexdigest()[:12]}"
    with _lock:
        if name not in _modules:
            _modules[name] = _imported(name, source.text, _published(f"{name}.py", source.text))
        return _modules[name]


@functools.cache
def modules_dir() -> Path:
    """The folder of generated modules: FLASHGEN_CACHE, else the user's cache folder, else one warning and a private temporary one."""
    return _writable_dir(Path(os.environ.get("FLASHGEN_CACHE") or platformdirs.user_cache_dir("flashgen")) / "modules", "modules")


@functools.cache
def compiled_dir() -> Path:
    """The folder where Triton keeps compiled kernels. If its own choice cannot be written, Triton is told to use another, with
    one warning."""
    from triton import knobs

    # An empty TRITON_CACHE_DIR would make Triton raise.
    wanted = Path(knobs.cache.dir or os.path.join(os.path.expanduser("~"), ".triton", "cache"))
    folder = _writable_dir(wanted, "compiled")
    if str(folder) != knobs.cache.dir:
        knobs.cache.dir = str(folder)
    return folder


def cache_info() -> CacheInfo:
    """Sizes of both caches."""
    modules, modules_bytes = _size(modules_dir())
    compiled, compiled_bytes = _size(compiled_dir())
    return CacheInfo(
        modules_path=modules_dir(),
        modules=modules,
        modules_bytes=modules_bytes,
        compiled_path=compiled_dir(),
        compiled=compiled,
        compiled_bytes=compiled_bytes,
    )


def clear_cache() -> int:
    """Deletes the files of generated modules (not Triton's cache, which other programs share); how many bytes that freed.

    Modules already imported, here or elsewhere, go on working.
    """
    freed = 0
    for path in modules_dir().glob("flashgen_*.py"):
        try:
            size = path.stat().st_size
            path.unlink()
        except FileNotFoundError:
            continue
        freed += size
    return freed


class _TextLoader(importlib.abc.ExecutionLoader):
    """Imports a text under a file's name. inspect, and with it Triton, reads the source from here even when the file is gone."""

    def __init__(self, path: Path, text: str) -> None:
        self.path, self.text = path, text

    def get_filename(self, fullname: str) -> str:
        return str(self.path)

    def get_source(self, fullname: str) -> str:
        return self.text


def _imported(name: str, text: str, path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, path, loader=_TextLoader(path, text))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _published(name: str, text: str) -> Path:
    """The file with this text, written whole or not at all: readers in other processes never see half of it."""
    path = modules_dir() / name
    try:
        if path.is_file() and path.read_bytes() == text.encode():
            return path
        descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{name}.")
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(text.encode())
            os.replace(temporary, path)
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise
    except OSError as error:  # the disk is full, or the folder went away
        _log.warning("the generated module %s is not kept: %s", path, error)
    return path


def _writable_dir(wanted: Path, purpose: str) -> Path:
    """wanted, if files can be made in it; else a folder of this user's own among the temporary files, and one warning."""
    reason = _why_not(wanted)
    if reason is None:
        return wanted
    fallback = Path(tempfile.gettempdir()) / f"flashgen-{os.getuid()}" / purpose
    # Another user may have made that name first, or a link in its place.
    if _why_not(fallback.parent, private=True) is not None or _why_not(fallback) is not None:
        fallback = Path(tempfile.mkdtemp(prefix="flashgen-")) / purpose
        fallback.mkdir()
    _log.warning("%s cannot be used for generated files (%s); using %s", wanted, reason, fallback)
    return fallback


def _why_not(folder: Path, private: bool = False) -> Any:
    """Why no file can be made in a folder, which is made first if there is none; None if one can."""
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700 if private else 0o777)
        if private:
            status = folder.lstat()
            if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o022:
                return f"{folder} belongs to someone else"
        with tempfile.TemporaryFile(dir=folder):
            return None
    except OSError as error:
        return error


def _size(folder: Path) -> tuple[int, int]:
    """How many files a folder holds, and their bytes; files that vanish meanwhile do not count."""
    files = size = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            try:
                size += os.lstat(os.path.join(parent, name)).st_size
                files += 1
            except FileNotFoundError:
                continue
    return files, size
