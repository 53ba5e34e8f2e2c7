"""Numbers as people read them: three digits and a prefix."""

import math

_PREFIXES = {-3: "n", -2: "µ", -1: "m", 0: "", 1: "k", 2: "M", 3: "G", 4: "T", 5: "P", 6: "E"}


def quantity(value: float, unit: str = "") -> str:
    """4.3 GB, 812 µs, 1.07 G: a value in its base unit with a decimal prefix, to about three digits."""
    if not math.isfinite(value):
        return f"{value} {unit}".rstrip()
    if value == 0:
        return f"0 {unit}".rstrip()
    power = min(max(math.floor(math.log10(abs(value)) / 3), -3), 6)
    if f"{abs(value) / 1000.0**power:.3g}" == "1e+03":  # 999.9 rounds up into the next prefix
        power = min(power + 1, 6)
    return f"{value / 1000.0**power:.3g} {_PREFIXES[power]}{unit}".rstrip()


def times(ratio: float) -> str:
    """A ratio: 11.8x, 0.96x."""
    return f"{ratio:.2f}x" if ratio < 10 else f"{ratio:.1f}x"


def tflops(flops: float, seconds: float) -> float:
    """TFLOP/s of this many operations in this time."""
    return flops / seconds / 1e12
