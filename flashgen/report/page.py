"""The report as one self-contained HTML page: numbers from data.py, figures drawn by templates/report/page.js.jinja."""

from collections.abc import Iterable, Sequence

from flashgen.record import Record
from flashgen.render import render
from flashgen.report import document
from flashgen.report.comparison import Comparison
from flashgen.report.data import data_of, place, provenance
from flashgen.report.limits import NAMES
from flashgen.report.summary import Summary, describe, peer_name, summarize, time_us
from flashgen.report.tables import NOTHING_MEASURED
from flashgen.report.units import quantity, times


def html(records: Iterable[Record], comparison: Comparison | None = None) -> str:
    """A page that needs no network: style, script, plotly.js and the rows as JSON are inside, each once."""
    summaries = summarize(records)
    measured = [summary for summary in summaries if not summary.is_predicted_only]
    return (
        document.environment()
        .get_template("page.html.jinja")
        .render(
            warning=NOTHING_MEASURED if not measured else "",
            summaries=summaries,
            comparison=comparison,
            provenance=provenance(summaries),
            limits=NAMES,
            **{each.__name__: each for each in (describe, peer_name, place, quantity, time_us, times)},
            plotly_js=document.plotly_js(),
            data=document.script_json(data_of(summaries, comparison) | {"sources": _sources(summaries)}),
        )
    )


def _sources(summaries: Sequence[Summary]) -> dict[str, str]:
    """The modules that today's templates give for the winners, by variant."""
    variants = {summary.winner.candidate.variant for summary in summaries if summary.winner and summary.winner.candidate}
    return {variant.name: render(variant).text for variant in sorted(variants, key=lambda variant: variant.name)}
