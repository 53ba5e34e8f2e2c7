"""The PTX of hopper forward kernels on a warp of numpy: what a warp does when references move is seen on a GPU only by chance."""

import functools
import re
from collections.abc import Callable

import numpy as np
import pytest

from flashgen.build import modules
from flashgen.candidate import Variant
from flashgen.render import render
from flashgen.schedule import EARLY_DIM

KEYS = 64  # of a block
LANES = np.arange(32)
ROWS = LANES[:, None] // 4 + 8 * (np.arange(KEYS // 2)[None, :] // 2 % 2)  # of a warp's 16, for each lane and register
COLUMNS = 2 * (LANES[:, None] % 4) + np.arange(KEYS // 2)[None, :] % 2 + 8 * (np.arange(KEYS // 2)[None, :] // 4)


@functools.cache
def module():  # type: ignore[no-untyped-def]
    return modules.load(render(Variant(backend="hopper", load="tma", order="qk_first", lazy_rescale=True)))


def run(text: str, registers: dict[str, np.ndarray]) -> bool:
    """Runs PTX on 32 lanes, and says whether it took its branch."""
    number = re.compile(r"0f([0-9A-F]{8})$")

    def read(name: str) -> np.ndarray:
        if match := number.match(name):
            return np.full(32, np.uint32(int(match[1], 16)).view(np.float32))
        if name in registers:
            return registers[name]
        return np.full(32, np.float32(name))

    def exp2(x: np.ndarray) -> np.ndarray:
        return np.exp2(x.astype(np.float64)).astype(np.float32)

    simple: dict[str, Callable[..., np.ndarray]] = {
        "add.f32": lambda a, b: a + b,
        "sub.f32": lambda a, b: a - b,
        "mul.f32": lambda a, b: a * b,
        "max.f32": np.fmax,
        "mov.f32": lambda a: a.copy(),
        "neg.f32": lambda a: -a,
        "ex2.approx.ftz.f32": exp2,
        "fma.rn.f32": lambda a, b, c: (a.astype(np.float64) * b + c).astype(np.float32),
        "setp.gtu.f32": lambda a, b: ~(a <= b),
        "setp.neu.f32": lambda a, b: ~(a == b),
        "selp.f32": lambda a, b, some: np.where(some, a, b),
        "shfl.sync.bfly.b32": lambda a, lanes, *_: a[LANES ^ int(lanes[0])],
        "vote.sync.any.pred": lambda some, _: np.full(32, some.any()),
        # Halves of a register are kept apart.
        "cvt.rn.bf16x2.f32": lambda second, first: np.stack([first, second], 1),
    }
    for line in text.strip("{} ").split("; "):
        words = line.replace(",", "").split()
        if words[0] == ".reg" or words[0] == "DONE:":
            continue
        if words[0] == "@!some":
            if not registers["some"].any():
                return False
            assert registers["some"].all()
            continue
        operands = [word if word != "0xffffffff" else "1" for word in words[2:]]
        with np.errstate(all="ignore"):
            registers[words[1]] = simple[words[0]](*map(read, operands))
    return True


def attention(blocks: list[np.ndarray], values: list[np.ndarray], scale: np.float32) -> tuple[np.ndarray, np.ndarray, list[bool]]:
    """Output (16, 8), log-sum-exp and the blocks whose references moved, of scores (16, KEYS) a block, as a warp finds them."""
    count = KEYS // 2
    settling = module().settling(count, "cvt.rn.bf16x2.f32", module().MOST.value)
    products = module().products_if_needed(4)
    kept, block, need, sums = (count // 2 + place for place in (0, 4, 8, 12 + count // 2 + 4))
    with np.errstate(all="ignore"):
        reference = np.fmax(np.float32(module().LOWEST.value), np.fmax.reduce(blocks[0], axis=1) * scale)
        weights = np.exp2(blocks[0].astype(np.float64) * scale - reference[:, None]).astype(np.float32)
        row_sum = np.stack([weights[:, lane * 2 % 8 :: 8].sum(1) + weights[:, lane * 2 % 8 + 1 :: 8].sum(1) for lane in range(4)], 1)
        out = weights.astype(np.float64) @ values[0]
    moved = []
    lane_rows = [LANES // 4, LANES // 4 + 8]  # the two rows of each lane
    for scores, value in zip(blocks[1:], values[1:], strict=True):
        with np.errstate(all="ignore"):
            weights = np.exp2((scores.astype(np.float64) * scale - reference[:, None]).astype(np.float32))
            own = weights[ROWS, COLUMNS]
        registers = {f"${sums + 4 + place}": scores[ROWS, COLUMNS][:, place] for place in range(count)}
        registers |= {f"${sums + 4 + count + place}": np.full(32, scale) for place in range(4)}
        pair_of = [(2 * piece + place % 2, place // 2) for piece in range(count // 8) for place in range(4)]  # piece of 8 columns, row
        for register, (piece, row) in enumerate(pair_of):
            registers[f"${register}"] = own[:, 4 * piece + 2 * row : 4 * piece + 2 * row + 2]
        for row in range(2):
            places = [place for place in range(count) if place // 2 % 2 == row]
            registers[f"${kept + 2 * row}"] = reference[lane_rows[row]]
            registers[f"${kept + 2 * row + 1}"] = row_sum[lane_rows[row], LANES % 4]
            registers[f"${sums + 2 * row}"] = registers[f"${sums + 2 * row + 1}"] = own[:, places].sum(1)
        moved.append(run(settling, registers))
        new = np.full_like(weights, np.nan)
        for register, (piece, row) in enumerate(pair_of):
            for half in range(2):
                place = 4 * piece + 2 * row + half
                new[ROWS[:, place], COLUMNS[:, place]] = registers[f"${register}"][:, half]
        for row in range(2):
            reference[lane_rows[row]] = registers[f"${kept + 2 * row}"]
            row_sum[lane_rows[row], LANES % 4] = registers[f"${kept + 2 * row + 1}"] + registers[f"${block + 2 * row}"]
        # Accumulators: eight columns of the output, as a thread holds them. Nobody writes factors that are not needed.
        held = {f"${place}": out[ROWS[:, place], COLUMNS[:, place]] for place in range(4)}
        held |= {f"${8 + place}": registers[f"${block + place}"] for place in range(4) if f"${block + place}" in registers}
        held["$12"] = registers[f"${need}"]
        assert run(products, held) == moved[-1]
        with np.errstate(all="ignore"):
            for place in range(4):
                out[ROWS[:, place], COLUMNS[:, place]] = held[f"${place}"]
            out = out + new.astype(np.float64) @ value
    with np.errstate(all="ignore"):
        total = row_sum.astype(np.float64).sum(1)
        lse = (reference + np.log2(total)) * np.log(2)
        return out / np.where(total == 0, 1, total)[:, None], lse, moved


def expected(blocks: list[np.ndarray], values: list[np.ndarray], scale: np.float32) -> tuple[np.ndarray, np.ndarray]:
    scores = np.concatenate(blocks, 1).astype(np.float64) * scale
    with np.errstate(all="ignore"):
        most = scores.max(1, keepdims=True)
        weights = np.exp2(scores - np.where(most == -np.inf, 0, most))
        total = weights.sum(1)
        lse = (np.where(most == -np.inf, 0, most)[:, 0] + np.log2(total)) * np.log(2)
        return weights @ np.concatenate(values) / np.where(total == 0, 1, total)[:, None], lse


def rows_of(numbers: list[float]) -> np.ndarray:
    """Each of a warp's rows gets another of the numbers."""
    return np.resize(np.array(numbers), 16)[:, None]


# What is added to each block's scores, which are of the order of 1 themselves.
SHIFTS: dict[str, list[object]] = {
    "even": [0, 0, 0, 0],
    "slow": [0, 3, 6, 9, 12, 15, 18],
    "fast": [0, 100, 1000, 1e4, 1e5],
    "beyond float32": [-1e30, -1e20, 0, 1e10, 1e20, 1e30],
    "falling": [1e5, 1000, 0, -1e30],
    "some rows": [0, rows_of([0, 0, 0, 300]), rows_of([1e4, 0, 0]), 0],
    "late rows": [rows_of([0, -np.inf]), rows_of([-np.inf, -np.inf, 5]), rows_of([0, 1000, -np.inf, -1000]), rows_of([-np.inf, 0])],
    "very low rows": [rows_of([-np.inf, 0]), rows_of([-np.inf, 0]), rows_of([-1e30, 0]), rows_of([-1e30, 1])],
    "unseen rows": [rows_of([0, -np.inf]), rows_of([50, -np.inf]), rows_of([100, -np.inf])],
    "not a number": [rows_of([0, 0, np.nan]), 0, 50, rows_of([np.nan, 0, 0, 0, 0])],
    "infinite": [0, rows_of([0, np.inf, 0]), 0, 20],
}


@pytest.mark.parametrize("name", SHIFTS)
def test_a_warp_is_right(name: str) -> None:
    """Scores that grow and fall, rows that see no key for long or ever, and what is no number, which reaches its own row alone."""
    random = np.random.default_rng(0)
    blocks = [(random.standard_normal((16, KEYS)) + shift).astype(np.float32) for shift in SHIFTS[name]]
    if "rows" in name:
        blocks[1][:, : KEYS // 2] = -np.inf  # keys that a mask hides
    values = [random.standard_normal((KEYS, 8)) for _ in blocks]
    out, lse, moved = attention(blocks, values, np.float32(1))  # with others the maximum, rounded, need not be that of rounded products
    right_out, right_lse = expected(blocks, values, np.float32(1))
    np.testing.assert_allclose(out, right_out, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(lse, right_lse, rtol=1e-5, atol=1e-5)
    assert any(moved) == (name not in ("even", "falling"))
    if name == "slow":
        assert not all(moved)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_the_cost_model_knows_when_output_is_waited_for(head_dim: int) -> None:
    """A template reads no numbers, so this one stands there and in `schedule`."""
    assert module().waits_early(head_dim) == (head_dim <= EARLY_DIM)
