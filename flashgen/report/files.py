"""The report as a file, in the format that its name ends in."""

import json
from collections.abc import Callable, Iterable
from pathlib import Path

from flashgen.errors import ArgumentError
from flashgen.record import Record
from flashgen.report import document
from flashgen.report.comparison import Comparison

Maker = Callable[[Iterable[Record], Comparison | None], str]


def write(path: Path, records: Iterable[Record], comparison: Comparison | None = None) -> None:
    """Writes the file whole or not at all, making the folder if there is none. Raises ArgumentError, OSError."""
    document.write(path, maker_for(path)(records, comparison))


def maker_for(path: Path) -> Maker:
    """What makes the text of a .html, .md or .json file. Raises ArgumentError for other names."""
    makers: dict[str, Maker] = {".html": _html, ".md": _markdown, ".json": _json}
    if path.suffix.lower() not in makers:
        raise ArgumentError(f"the report's file is {str(path)!r}; its name must end in {', '.join(makers)}")
    return makers[path.suffix.lower()]


def _html(records: Iterable[Record], comparison: Comparison | None) -> str:
    from flashgen.report.page import html  # Plotly and Jinja take a while to import

    return html(records, comparison)


def _markdown(records: Iterable[Record], comparison: Comparison | None) -> str:
    from flashgen.report.markdown import markdown

    return markdown(records, comparison)


def _json(records: Iterable[Record], comparison: Comparison | None) -> str:
    from flashgen.report.data import data

    return json.dumps(data(records, comparison), indent=1, allow_nan=False) + "\n"
