"""What every test gets: places of its own for everything that flashgen keeps, and skips where the machine lacks what a test needs."""

import os
import tempfile
from pathlib import Path

import hypothesis
import pytest

hypothesis.settings.register_profile("flashgen", deadline=None, derandomize="CI" in os.environ, print_blob=True)
hypothesis.settings.load_profile("flashgen")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="write the golden modules anew instead of comparing with them")


def pytest_configure(config: pytest.Config) -> None:
    """Nothing under the user's home is read or written; Triton's own cache, keyed by content, is kept from run to run for speed.

    The environment is set before flashgen or Triton are imported, and processes that tests start inherit it.
    """
    home = tempfile.TemporaryDirectory(prefix="flashgen-tests-")
    config.add_cleanup(home.cleanup)
    for name in ("CACHE", "CONFIG", "DATA", "STATE"):
        os.environ[f"XDG_{name}_HOME"] = str(Path(home.name, name.lower()))
    os.environ["HOME"] = home.name
    os.environ["FLASHGEN_CACHE"] = str(Path(home.name, "modules"))
    os.environ["FLASHGEN_DATABASE"] = str(Path(home.name, "outside-of-a-test.db"))
    os.environ["FLASHGEN_TUNING_DB"] = str(Path(home.name, "tuning_db"))  # no winners ship, unless a test says so
    os.environ.setdefault("TRITON_CACHE_DIR", str(config.rootpath / ".pytest_cache" / "triton"))


@pytest.fixture(autouse=True)
def own_database(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Each test has a database of its own, which does not exist yet."""
    path = tmp_path / "flashgen.db"
    monkeypatch.setenv("FLASHGEN_DATABASE", str(path))
    return path


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips tests marked gpu or hopper where there is no such device."""
    marked = [item for item in items if item.get_closest_marker("gpu") or item.get_closest_marker("hopper")]
    if not marked:
        return
    import torch

    capability = torch.cuda.get_device_capability() if torch.cuda.is_available() else (0, 0)
    for item in marked:
        if capability < (8, 0):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device of sm_80 or later"))
        elif item.get_closest_marker("hopper") and capability != (9, 0):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device of sm_90"))
