"""What HTML pages have in common: their templates, data inside a script element, and a file that is whole or not there."""

import json
import os
from functools import cache
from pathlib import Path
from typing import Any

import jinja2
import markupsafe
import plotly.offline

from flashgen.render import templates_dir


@cache
def environment() -> jinja2.Environment:
    """The environment of templates/report: it escapes, and an unknown name is an error."""
    return jinja2.Environment(
        loader=jinja2.FileSystemLoader(templates_dir() / "report"),
        undefined=jinja2.StrictUndefined,
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def script_json(value: Any) -> markupsafe.Markup:
    """JSON that cannot close the script element it stands in."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False, ensure_ascii=False)
    for char in "<>&\u2028\u2029":
        text = text.replace(char, f"\\u{ord(char):04x}")
    return markupsafe.Markup(text)


def plotly_js() -> markupsafe.Markup:
    """The charting library, about 5 MB."""
    return markupsafe.Markup(plotly.offline.get_plotlyjs())


def write(path: Path, text: str) -> None:
    """Writes a page whole or not at all, making the folder if there is none. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        unfinished.write_text(text, encoding="utf-8")
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)
