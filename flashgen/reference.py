"""Attention in plain PyTorch: the float64 oracle, and the same sums in the precision of the tensors.

The mask is built from the words of Problem's docstring, as one boolean per query and key, for a block of rows at a time. Nothing
here is shared with the kernels, nor with Problem.band, so that a mistake there cannot hide in the oracle. Memory is linear in the
sequence length.
"""

import contextlib
import math
from collections.abc import Iterator

import torch
from torch import Tensor

BLOCK_ROWS = 1024
SCORES_BYTES = 256 * 2**20  # the most that one block of scores may take; a block of one row of one head always goes


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    mask: str = "full",
    window: tuple[int | None, int | None] | None = None,
    scale: float | None = None,
    layout: str = "bhsd",
) -> tuple[Tensor, Tensor]:
    """The float64 oracle: softmax(scale * Q K^T + mask) V, and the natural logarithm of each row's sum of exponentials.

    query, key, value: (batch, heads, seqlen, head_dim), or (batch, seqlen, heads, head_dim) with layout bshd; any strides, any
    dtype. mask, window and heads mean what Problem says they do; scale None is 1/sqrt(head_dim_qk). Returns out in the same layout
    and lse (batch, heads_q, seqlen_q), both float64. A row without a visible key gives zeros and -inf.
    """
    return _attend(query, key, value, mask, window, scale, layout, torch.float64, torch.float64)


def plain(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    mask: str = "full",
    window: tuple[int | None, int | None] | None = None,
    scale: float | None = None,
    layout: str = "bhsd",
) -> tuple[Tensor, Tensor]:
    """What an honest implementation in the tensors' dtype gets: its error is the yardstick of a kernel's.

    Scores and sums are float32 (IEEE, whatever torch's TF32 switches say), the weights are rounded to the dtype before they meet V,
    and so is out: the roundings that no kernel on matrix units can avoid. Arguments and results as in `attention`, with out in the
    tensors' dtype and lse in float32.
    """
    with _ieee_products():
        out, lse = _attend(query, key, value, mask, window, scale, layout, torch.float32, value.dtype)
    return out.to(value.dtype), lse


def visibility(
    mask: str,
    window: tuple[int | None, int | None] | None,
    seqlen_q: int,
    seqlen_kv: int,
    rows: range | None = None,
    device: torch.device | str | None = None,
) -> Tensor:
    """Boolean (rows, seqlen_kv): whether each query of `rows` (None: all) sees each key.

    A query stands on one key, its diagonal: the last query on the last key, or with causal_top_left the first on the first. Causal
    masks hide the keys after it; a window hides those more than `left` before or more than `right` after it (None or -1: none).
    """
    rows = range(seqlen_q) if rows is None else rows
    left, right = (None, None) if window is None else window
    keys = torch.arange(seqlen_kv, device=device)[None, :]
    stands_on = torch.arange(rows.start, rows.stop, device=device)[:, None]
    if mask != "causal_top_left":
        stands_on = stands_on + (seqlen_kv - seqlen_q)
    sees = torch.ones(len(rows), seqlen_kv, dtype=torch.bool, device=device)
    if mask != "full":
        sees &= keys <= stands_on
    if left is not None and left != -1:
        sees &= keys >= stands_on - left
    if right is not None and right != -1:
        sees &= keys <= stands_on + right
    return sees


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: str,
    window: tuple[int | None, int | None] | None,
    scale: float | None,
    layout: str,
    precision: torch.dtype,
    weights_dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """Sums in `precision`; weights pass through `weights_dtype` before the second product."""
    out = torch.zeros(*query.shape[:-1], value.shape[-1], dtype=precision, device=query.device)
    q, k, v, o = (t.transpose(1, 2) if layout == "bshd" else t for t in (query, key, value, out))
    batch, heads_q, seqlen_q, head_dim = q.shape
    heads_kv, seqlen_kv = k.shape[1:3]
    group = heads_q // heads_kv
    scale = 1 / math.sqrt(head_dim) if scale is None else scale
    lse = torch.full((batch, heads_q, seqlen_q), -math.inf, dtype=precision, device=query.device)
    q, o, lse_of_group = (torch.unflatten(t, 1, (heads_kv, group)) for t in (q, o, lse))  # (batch, heads_kv, group, seqlen_q, ...)

    for items, heads, blocks in _blocks(batch, heads_kv, seqlen_q, group * seqlen_kv * precision.itemsize):
        keys, values = k[items, heads].to(precision), v[items, heads].to(precision)  # (items, heads, seqlen_kv, head_dim)
        for rows in blocks:
            sees = visibility(mask, window, seqlen_q, seqlen_kv, rows, query.device)
            seen = sees.any(dim=0).nonzero()
            if not len(seen):
                continue
            span = slice(int(seen[0]), int(seen[-1]) + 1)  # no row of the block sees a key outside it
            these = slice(rows.start, rows.stop)
            queries = q[items, heads, :, these].to(precision).flatten(2, 3)  # (items, heads, group * rows, head_dim)
            scores = torch.unflatten((queries @ keys[:, :, span].transpose(-1, -2)).mul_(scale), 2, (group, len(rows)))
            scores.masked_fill_(~sees[:, span], -math.inf)
            most = scores.amax(dim=-1, keepdim=True)
            most.masked_fill_(most == -math.inf, 0.0)
            weights = scores.sub_(most).exp_()
            total = weights.sum(dim=-1, keepdim=True)
            lse_of_group[items, heads, :, these] = (most + total.log()).squeeze(-1)
            sums = weights.to(weights_dtype).to(precision).flatten(2, 3) @ values[:, :, span]
            o[items, heads, :, these] = torch.unflatten(sums, 2, (group, len(rows))) / total.masked_fill_(total == 0, 1.0)
    return out, lse


def _blocks(batch: int, heads_kv: int, seqlen_q: int, row_bytes: int) -> Iterator[tuple[slice, slice, list[range]]]:
    """Batch items and key/value heads to take together, and the blocks of rows to take one after another for them.

    row_bytes is what one row of scores of one group of heads takes.
    """
    rows = max(1, min(BLOCK_ROWS, SCORES_BYTES // max(1, row_bytes)))
    pairs = max(1, SCORES_BYTES // max(1, row_bytes * min(rows, seqlen_q)))
    heads = min(heads_kv, pairs)
    items = max(1, pairs // heads)
    blocks = [range(start, min(seqlen_q, start + rows)) for start in range(0, seqlen_q, rows)]
    for item in range(0, batch, items):
        for head in range(0, heads_kv, heads):
            yield slice(item, item + items), slice(head, head + heads), blocks


@contextlib.contextmanager
def _ieee_products() -> Iterator[None]:
    """Float32 matrix products on the GPU in float32, for the time being."""
    matmul = torch.backends.cuda.matmul
    before = matmul.fp32_precision
    matmul.fp32_precision = "ieee"
    try:
        yield
    finally:
        matmul.fp32_precision = before
