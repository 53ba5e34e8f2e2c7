"""Reports made from records: tables in the terminal; HTML, Markdown and JSON as files; and the workshop.

units       numbers as people read them
braille     a line plot in the terminal
layer       the paper's model as a table and a plot
limits      why a kernel is not faster
knobs       how much each knob matters
commands    what reproduces a row
summary     what the rows of one problem come to; the numbers under all reports
comparison  two sets of rows side by side
tables      the report in the terminal
counters    predicted against counted, as tables in the terminal
data        the report as JSON
markdown    the report as Markdown
document    what HTML pages have in common
page        the report as HTML
files       a report as a file
workshop    the models to play with, as HTML
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flashgen.report.page import html
    from flashgen.report.tables import terminal

__all__ = ["html", "terminal"]


def __getattr__(name: str) -> Any:
    # The page alone needs Plotly and Jinja, which take a while to import.
    if name == "terminal":
        from flashgen.report.tables import terminal

        return terminal
    if name == "html":
        from flashgen.report.page import html

        return html
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
