"""A log-log line plot drawn with braille dots, for the terminal."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from flashgen.report.units import quantity

COLOURS = ("red", "cyan", "green", "magenta")
_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))  # bit of the dot in row, column of one cell
_PLAIN = "*o+x"  # where the terminal cannot show braille: one letter a series

Points = Sequence[tuple[float, float]]


@dataclass(frozen=True, kw_only=True)
class Plot:
    """Lines over (x, y), both positive and on logarithmic axes; renders to the width of the console."""

    series: Mapping[str, Points]
    x_label: str
    y_label: str
    mark_x: float | None = None  # a dotted vertical line
    height: int = 16
    width: int = 76

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        xs = [math.log10(x) for points in self.series.values() for x, _ in points]
        ys = [math.log10(y) for points in self.series.values() for _, y in points]
        if not xs:
            return
        margin = 8
        names = max(len(name) for name in self.series) + 1
        columns = max(10, min(self.width, options.max_width) - margin - 1 - names)
        left, right, bottom, top = min(xs), max(xs), min(ys), max(ys)
        dots: dict[tuple[int, int], int] = {}
        owner: dict[tuple[int, int], int] = {}

        def paint(x: float, y: float, index: int) -> None:
            column = round((x - left) / ((right - left) or 1) * (columns * 2 - 1))
            row = round((top - y) / ((top - bottom) or 1) * (self.height * 4 - 1))
            cell = (row // 4, column // 2)
            dots[cell] = dots.get(cell, 0) | _DOTS[row % 4][column % 2]
            owner[cell] = index

        if self.mark_x is not None and left <= math.log10(self.mark_x) <= right:
            for step in range(0, self.height * 4, 3):
                paint(math.log10(self.mark_x), top - (top - bottom) * step / (self.height * 4 - 1), -1)
        ends: dict[int, tuple[str, int]] = {}
        for index, (name, points) in enumerate(self.series.items()):
            ordered = sorted((math.log10(x), math.log10(y)) for x, y in points)
            for (x0, y0), (x1, y1) in zip(ordered, ordered[1:] or ordered):
                steps = columns * 2 + self.height * 4
                for step in range(steps + 1):
                    paint(x0 + (x1 - x0) * step / steps, y0 + (y1 - y0) * step / steps, index)
            ends[round((top - ordered[-1][1]) / ((top - bottom) or 1) * (self.height - 1))] = (name, index)

        yield Text(self.y_label, style="dim")
        labels = {round((top - y) / ((top - bottom) or 1) * (self.height - 1)): 10.0**y for y in _decades(bottom, top)}
        for row in range(self.height):
            line = Text(f"{quantity(labels[row]) if row in labels else '':>{margin - 1}} ", style="dim")
            line.append("┤" if row in labels and not options.ascii_only else "|" if options.ascii_only else "│")
            for column in range(columns):
                who = owner.get((row, column))
                if who is None:
                    line.append(" ")
                    continue
                glyph = (":" if who < 0 else _PLAIN[who % 4]) if options.ascii_only else chr(0x2800 + dots[row, column])
                line.append(glyph, style="dim" if who < 0 else COLOURS[who % len(COLOURS)])
            if row in ends:
                line.append(f" {ends[row][0]}", style=COLOURS[ends[row][1] % len(COLOURS)])
            yield line
        yield Text(" " * margin + ("+" + "-" * columns if options.ascii_only else "└" + "─" * columns), style="dim")
        first, last = f"{round(10**left)}", f"{round(10**right)}"
        yield Text(" " * (margin + 1) + first + self.x_label.center(columns - len(first) - len(last)) + last, style="dim")


def _decades(low: float, high: float) -> list[int]:
    whole = list(range(math.ceil(low), math.floor(high) + 1))
    return whole[:: max(1, len(whole) // 5)]
