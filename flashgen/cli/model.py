"""flashgen model: the paper's traffic analysis and roofline."""

import dataclasses
import math
from typing import Annotated

import typer
from rich.console import Console

from flashgen.cli.answer import Answer
from flashgen.device import DEVICES, Device
from flashgen.errors import ArgumentError
from flashgen.problem import DIRECTIONS


def model(
    seqlen: Annotated[int, typer.Option(metavar="N", help="Length of the sequence.", show_default=False)],
    head_dim: Annotated[int, typer.Option(metavar="N", help="Head dim.")] = 128,
    heads: Annotated[int, typer.Option(metavar="N", help="Heads of the layer.")] = 32,
    device: Annotated[str, typer.Option(metavar="NAME", help=f"{', '.join(DEVICES)}.")] = "h100",
    sram_kb: Annotated[
        float | None, typer.Option(metavar="KB", help="On-chip memory in units of 1024 bytes; by default one SM's.", show_default=False)
    ] = None,
    direction: Annotated[str, typer.Option(metavar="NAME", help=f"{' or '.join(DIRECTIONS)} (gradients).")] = "forward",
    causal: Annotated[
        bool, typer.Option("--causal", help="With a causal mask, of which FlashAttention skips the hidden half and the standard nothing.")
    ] = False,
) -> Answer:
    """Memory traffic and time of standard attention and FlashAttention, by the paper's model.

    Elements are per head, times and score bytes over all heads; bf16.
    """
    from flashgen import theory

    if sram_kb is not None and not (sram_kb > 0 and math.isfinite(sram_kb)):
        raise ArgumentError(f"--sram-kb is {sram_kb}; it must be above 0")
    part = Device.named(device)
    sram_bytes = None if sram_kb is None else sram_kb * 1024
    layer = theory.layer(seqlen, head_dim, heads, part, sram_bytes=sram_bytes, direction=direction, causal=causal)

    def show(console: Console) -> None:
        from flashgen.report.layer import layer_plot, layer_table

        console.print(layer_table(layer, seqlen, head_dim, heads, part, direction, causal))
        console.print()
        console.print(layer_plot(seqlen, head_dim, part, sram_bytes, direction, causal))

    return Answer(data=dataclasses.asdict(layer), show=show)
