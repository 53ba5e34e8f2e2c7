"""Pages in headless Chromium: opened from a file, without a network, and without an error on the console."""

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

# FLASHGEN_CHROMIUM names another one.
NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
ARGUMENTS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"]
ARGUMENTS += ["--disable-component-update", "--disable-sync"]
PHONE: dict[str, Any] = {"viewport": {"width": 390, "height": 844}, "device_scale_factor": 2, "has_touch": True, "is_mobile": True}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker("browser")


@pytest.fixture(scope="session")
def chromium() -> "Iterator[Browser]":
    """The browser; tests are skipped where there is none."""
    executable = os.environ.get("FLASHGEN_CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)
    if executable is None:
        pytest.skip(f"needs Chromium: none of {', '.join(NAMES)} is on the PATH, and FLASHGEN_CHROMIUM names none")
    sync_api = pytest.importorskip("playwright.sync_api", reason="needs the Python package playwright")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=executable, args=ARGUMENTS)
        yield browser
        browser.close()


@pytest.fixture
def open_page(chromium: "Browser") -> "Iterator[Callable[..., Page]]":
    """Opens a file: open_page(path, "#fragment", **options of a browser context, such as color_scheme="dark" or **PHONE).

    The page has no network. The test fails for whatever it asked for there, for every uncaught error and each warning or error on the
    console.
    """
    complaints: list[str] = []
    contexts = []

    def open(path: Path, fragment: str = "", **options: Any) -> "Page":
        context = chromium.new_context(**{"viewport": {"width": 1280, "height": 900}, "offline": True, **options})
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(20_000)
        page.on("console", lambda message: complaints.append(message.text) if message.type in ("error", "warning") else None)
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("request", lambda request: complaints.append(request.url) if request.url.startswith(("http", "ws")) else None)
        page.goto(path.resolve().as_uri() + fragment)
        return page

    yield open
    for context in contexts:
        context.close()
    assert complaints == []
