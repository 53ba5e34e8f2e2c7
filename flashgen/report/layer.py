"""The paper's model in the terminal: a table for one length, a plot over many."""

from rich.table import Table

from flashgen import theory
from flashgen.device import Device
from flashgen.report.braille import Plot
from flashgen.report.units import quantity, times


def layer_table(layer: theory.LayerModel, seqlen: int, head_dim: int, heads: int, device: Device, direction: str, causal: bool) -> Table:
    """Standard attention and FlashAttention side by side."""
    mask = ", causal" if causal else ""
    title = f"N = {seqlen}, head dim {head_dim}, {heads} heads, bf16, {direction}{mask}, on {device.name}"
    table = Table(title=title, title_justify="left", box=None, header_style="bold", pad_edge=False)
    table.add_column("")
    for name in ("standard", "flash", "ratio"):
        table.add_column(name, justify="right")
    table.add_row(
        "memory traffic per head, elements",
        quantity(layer.standard_elements),
        quantity(layer.flash_elements),
        times(layer.traffic_ratio),
    )
    table.add_row(
        f"time per layer of {heads} heads, by roofline",
        quantity(layer.standard_time_s, "s"),
        quantity(layer.flash_time_s, "s"),
        times(layer.time_ratio),
    )
    table.add_row("score matrices, all heads", quantity(layer.score_bytes, "B"), "not stored", "")
    return table


def layer_plot(seqlen: int, head_dim: int, device: Device, sram_bytes: float | None, direction: str, causal: bool) -> Plot:
    """Traffic per head against sequence length, log-log, with the chosen length marked."""
    lengths = sorted({2**power for power in range(8, 18)} | {seqlen})
    layers = [(length, theory.layer(length, head_dim, 1, device, sram_bytes, direction=direction, causal=causal)) for length in lengths]
    return Plot(
        series={
            "standard": [(length, layer.standard_elements) for length, layer in layers],
            "flash": [(length, layer.flash_elements) for length, layer in layers],
        },
        x_label="sequence length N",
        y_label="elements per head",
        mark_x=seqlen,
    )
