"""Shapes that break pipelines and masks, for the tests of warp-specialised kernels."""

# Around multiples of the tiles (64, 128 and 192 rows; 64 and 128 keys), and where rows see no key, or no row a key.
LENGTHS = [(1, 1), (1, 777), (63, 65), (64, 128), (129, 127), (191, 193), (300, 100), (520, 648), (577, 577), (1000, 1030)]
MASKS = {
    "full": dict(),
    "causal": dict(mask="causal"),
    "top left": dict(mask="causal_top_left"),
    "window": dict(mask="causal", window=(100, None)),
    "left side": dict(window=(90, None)),
    "both sides": dict(window=(70, 33)),
    "itself only": dict(window=(0, 0)),
}
DIMS = {"64": (64, 64), "128": (128, 128), "256": (256, 256), "odd": (80, 40), "192/128": (192, 128), "64/256": (64, 256)}
