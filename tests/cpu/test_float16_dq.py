"""Sums of dq in float16: scales that fit whatever comes, and errors beside those of float32."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# (what the inputs are like, keys, head dim)
ORDINARY = [
    ("random", 130, 64),
    ("random", 1024, 128),
    ("random", 16384, 128),
    ("dlse", 1024, 64),
    ("large dlse", 1024, 64),
    ("huge", 1024, 64),
    ("huge beyond squares", 1024, 64),
    ("tiny", 1024, 64),
    ("tiny below squares", 1024, 64),
    ("rows of all sizes", 1024, 64),
    ("one large key", 16384, 128),
    ("one sign", 16384, 64),
    ("largest partial sums", 16384, 64),
]
BEYOND = [("infinite", 256, 64), ("beyond any scale", 256, 64)]


@pytest.fixture(scope="module")
def found() -> dict[tuple[str, int, int], dict[str, float]]:
    """What interpreted_float16_dq.py says of each case."""
    script = Path(__file__).with_name("interpreted_float16_dq.py")
    environment = dict(os.environ, TRITON_INTERPRET="1", PYTHONPATH=os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]))
    cases = json.dumps(ORDINARY + BEYOND)
    done = subprocess.run([sys.executable, str(script), cases], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return {(name, keys, dim): said for name, keys, dim, said in map(json.loads, done.stdout.splitlines())}


@pytest.mark.parametrize("case", ORDINARY, ids=str)
def test_no_sum_overflows_and_errors_are_those_of_bfloat16(found, case):
    """Blocks of 128 keys come in a random order. With sums in float16 dq is at most 1.5 times as far off as with
    sums in float32, most of whose error comes from bfloat16 products and results."""
    said = found[case]
    assert said["powers_of_two"] and said["largest"] < 0.5  # the other half is for roundings
    assert said["float16"] <= 1.5 * said["float32"] + 1e-5
    assert said["worst_row_float16"] <= 2 * said["worst_row_float32"] + 1e-5


@pytest.mark.parametrize("case", BEYOND, ids=str)
def test_what_no_scale_fits_gives_no_number(found, case):
    """Infinite values, and products beyond float32."""
    assert found[case]["scales_are_nan"] and found[case]["dq_is_nan"]
