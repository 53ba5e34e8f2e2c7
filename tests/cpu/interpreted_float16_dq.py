"""Run by test_float16_dq.py with TRITON_INTERPRET=1: sums of dq in float16, on the CPU, by the functions that a hopper kernel has before
and after its loop. The loop itself, which nothing interprets, is torch: the same products of the same roundings, a block of keys at a time,
and a rounding after each addition, in a random order.

Prints one line of JSON for each case: what it was, errors of dq relative to its norm with sums in float16 and in float32, the same of the
worst row, and the largest sum on the way as a share of what float16 holds.
"""

import functools
import json
import math
import sys

import torch
from torch import Tensor

from flashgen.build.modules import load
from flashgen.candidate import Variant
from flashgen.render import render

torch.set_num_threads(1)
ROWS, BLOCK, MOST = 64, 128, 65504.0
BFLOAT16, DOUBLE = torch.bfloat16, torch.float64


def inputs(name: str, keys: int, dim: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:
    """q, k, v, dout and dlse of a case."""
    random = torch.Generator().manual_seed(keys + dim)
    draw = functools.partial(torch.randn, generator=random, dtype=DOUBLE)
    q, k, v, dout, dlse = draw(ROWS, dim), draw(keys, dim), draw(keys, dim), draw(ROWS, dim), None
    if name == "huge":
        q, k, v, dout = q * 1e-4, k * 1e4, v * 1e4, dout * 1e4
    elif name == "huge beyond squares":
        v, dout = v * 1e20, dout * 1e-4
    elif name == "tiny":
        q, k, v, dout = q * 1e10, k * 1e-10, v * 1e-10, dout * 1e-10
    elif name == "tiny below squares":
        v, dout = v * 1e-30, dout * 1e10
    elif name == "rows of all sizes":
        dout *= 10.0 ** torch.linspace(-30, 10, ROWS, dtype=DOUBLE)[:, None]
    elif name == "one large key":  # which rows hardly see, and which makes the scale smaller for all of them
        q[:, 0], k[keys // 2], k[keys // 2, 0] = 4.0, 0.0, -30.0
        v[keys // 2] *= 1000.0
    elif name == "infinite":
        v[keys // 2, 0] = math.inf
    elif name == "beyond any scale":
        q, k, v, dout = q * 1e-30, k * 1e30, v * 1e30, dout * 1e30
    elif name == "large dlse":
        dlse = 1e6 * draw(ROWS)
    elif name == "one sign":  # all terms as large as they can be without a part of delta, and none against the others
        q *= 1e-6
        signs = torch.where(torch.arange(keys) % 2 == 0, 1.0, -1.0).to(DOUBLE)[:, None]
        k, v, dout = signs.expand(keys, dim).clone(), signs.expand(keys, dim).clone(), torch.ones(ROWS, dim, dtype=DOUBLE)
    elif name == "largest partial sums":  # the first half of the keys goes up as far as the second comes down
        q *= 1e-6
        signs = torch.where(torch.arange(keys) < keys // 2, 1.0, -1.0).to(DOUBLE)[:, None]
        k, v, dout = (1.5 - 0.5 * signs).expand(keys, dim).clone(), signs.expand(keys, dim).clone(), torch.ones(ROWS, dim, dtype=DOUBLE)
    elif name == "dlse":
        dlse = draw(ROWS)
    return *(each.to(BFLOAT16) for each in (q, k, v, dout)), dlse


def case(name: str, keys: int, dim: int) -> dict[str, object]:
    """What is said of a case."""
    q, k, v, dout, dlse = inputs(name, keys, dim)
    scale = dim**-0.5
    scores = scale * (q.to(DOUBLE) @ k.to(DOUBLE).T)
    lse = scores.logsumexp(1)
    weights = (scores - lse[:, None]).exp()
    exact_out = weights @ v.to(DOUBLE)
    dweights = dout.to(DOUBLE) @ v.to(DOUBLE).T
    upstream = torch.zeros(ROWS, dtype=DOUBLE) if dlse is None else dlse
    exact = scale * (weights * (dweights - (dout.to(DOUBLE) * exact_out).sum(1)[:, None] + upstream[:, None])) @ k.to(DOUBLE)

    variant = Variant(family="backward", backend="hopper", load="tma", fused=True, float16_dq=True, store_lse=dlse is not None)
    module = load(render(variant))
    blocks, empty = -(-keys // BLOCK), torch.empty
    bounds, rows, scales = empty(2 * blocks), empty(2 * ROWS), empty(ROWS)
    sums = torch.full((ROWS, dim), math.nan, dtype=torch.float16)
    dq = torch.empty(ROWS, dim)  # the interpreter does not round to bfloat16, it cuts off
    strides = (0, 0, dim)
    module.attention_backward_bounds[(blocks,)](k, v, bounds, *strides, *strides, 1, 1, keys, dim, dim, dim, dim, BLOCK)
    given = [exact_out.to(BFLOAT16), lse.float(), dout] + ([] if dlse is None else [dlse.float()])
    numbers = (*strides, *strides, 1, 1, ROWS, keys, scale, dim, dim, dim, ROWS, BLOCK)
    module.attention_backward_delta[(1,)](*given, rows, bounds, scales, sums, *numbers)

    dscores = (weights.float() * (dweights.float() + rows[ROWS:, None])).to(BFLOAT16).to(DOUBLE)
    plain, largest = torch.zeros(ROWS, dim), 0.0
    order = torch.randperm(blocks, generator=torch.Generator().manual_seed(1)).tolist() if name != "largest partial sums" else range(blocks)
    for block in order:
        own = slice(block * BLOCK, (block + 1) * BLOCK)
        product = (dscores[:, own] @ k[own].to(DOUBLE)).float()
        plain += product
        sums += (product * scales[:, None]).half()
        largest = max(largest, float(sums.abs().max()))
    # Each warpgroup has half of the columns, in the order of its registers.
    shares = sums.reshape(4, 2, 8, 2, dim // 32, 2, 4, 2).permute(3, 4, 0, 2, 6, 5, 1, 7).contiguous()
    module.attention_backward_dq_convert[(2,)](shares, scales, dq, *strides, 1, ROWS, scale, dim, dim, ROWS)

    def errors(got: Tensor) -> tuple[float, float]:
        wrong, right = (got.to(DOUBLE) - exact).norm(dim=1), exact.norm(dim=1)
        unit = right.max()  # rows of other sizes would vanish beside the largest
        return float((wrong / unit).norm() / (right / unit).norm()), float((wrong / right).max())

    (in_float16, of_row), (in_float32, plain_row) = errors(dq.to(BFLOAT16)), errors((plain * scale).to(BFLOAT16))
    return dict(
        float16=in_float16,
        float32=in_float32,
        worst_row_float16=of_row,
        worst_row_float32=plain_row,
        largest=largest / MOST,
        powers_of_two=bool((scales.frexp().mantissa == 0.5).all()),
        scales_are_nan=bool(scales.isnan().all()),
        dq_is_nan=bool(dq.isnan().all()),
    )


if __name__ == "__main__":
    for arguments in json.loads(sys.argv[1]):
        print(json.dumps([*arguments, case(*arguments)]), flush=True)
