"""Attention and its gradients in plain PyTorch: the float64 oracle, and the same sums in the precision of the tensors.

The mask is built from the words of Problem's docstring, as one boolean per query and key, for a block of rows at a time. Nothing
here is shared with the kernels, nor with Problem.band, so that a mistake there cannot hide in the oracle. Memory is linear in the
sequence length.
"""

import contextlib
import math
from collections.abc import Iterator
from typing import NamedTuple

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


def gradients(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dout: Tensor,
    dlse: Tensor | None = None,
    *,
    mask: str = "full",
    window: tuple[int | None, int | None] | None = None,
    scale: float | None = None,
    layout: str = "bhsd",
) -> tuple[Tensor, Tensor, Tensor]:
    """The float64 oracle of the backward pass: the gradients of sum(out * dout) + sum(lse * dlse), for `attention`'s out and lse.

    dout has the shape of out, dlse that of lse, (batch, heads_q, seqlen_q); any strides, any dtype. The other arguments are those of
    `attention`. Returns dq, dk, dv in the shapes of query, key, value, float64. A row without a visible key, and a key that no query
    sees, have gradients of 0.
    """
    return _differentiate(query, key, value, dout, dlse, mask, window, scale, layout, torch.float64, torch.float64)


def plain_gradients(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dout: Tensor,
    dlse: Tensor | None = None,
    *,
    mask: str = "full",
    window: tuple[int | None, int | None] | None = None,
    scale: float | None = None,
    layout: str = "bhsd",
) -> tuple[Tensor, Tensor, Tensor]:
    """What an honest backward pass in the tensors' dtype gets: its error is the yardstick of a kernel's.

    As in `plain`, scores and sums are float32, and so is the log-sum-exp that weights are made from anew. Rounded to the dtype are out,
    of which the row sums of dout * out are taken; the weights and the gradients of the scores before their products; and the results:
    what no kernel on matrix units can avoid.
    """
    with _ieee_products():
        found = _differentiate(query, key, value, dout, dlse, mask, window, scale, layout, torch.float32, value.dtype)
    dq, dk, dv = (each.to(value.dtype) for each in found)
    return dq, dk, dv


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


class _Tile(NamedTuple):
    """Some rows of all query heads of some key/value heads of some batch items, and the keys that a row of them sees."""

    items: slice
    heads: slice  # of keys and values
    rows: slice
    span: slice  # of keys: no row sees one outside it
    queries: Tensor  # (items, heads, group * rows, head_dim_qk)
    keys: Tensor  # (items, heads, span, head_dim_qk)
    values: Tensor  # (items, heads, span, head_dim_v)
    scores: Tensor  # (items, heads, group, rows, span), scaled; -inf where hidden


def _tiles(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: str,
    window: tuple[int | None, int | None] | None,
    scale: float,
    precision: torch.dtype,
    scratch: int,
) -> Iterator[_Tile]:
    """All tiles that are not hidden altogether. Tensors are in layout bhsd; scratch: how many matrices like scores there are at a time."""
    batch, heads_q, seqlen_q, _ = query.shape
    heads_kv, seqlen_kv = key.shape[1:3]
    group = heads_q // heads_kv
    query = torch.unflatten(query, 1, (heads_kv, group))
    for items, heads, blocks in _blocks(batch, heads_kv, seqlen_q, scratch * group * seqlen_kv * precision.itemsize):
        keys, values = key[items, heads].to(precision), value[items, heads].to(precision)
        for rows in blocks:
            sees = visibility(mask, window, seqlen_q, seqlen_kv, rows, query.device)
            seen = sees.any(dim=0).nonzero()
            if not len(seen):
                continue
            span, these = slice(int(seen[0]), int(seen[-1]) + 1), slice(rows.start, rows.stop)
            queries = query[items, heads, :, these].to(precision).flatten(2, 3)
            scores = torch.unflatten((queries @ keys[:, :, span].transpose(-1, -2)).mul_(scale), 2, (group, len(rows)))
            scores.masked_fill_(~sees[:, span], -math.inf)
            yield _Tile(items, heads, these, span, queries, keys[:, :, span], values[:, :, span], scores)


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
    lse = torch.full(q.shape[:3], -math.inf, dtype=precision, device=query.device)
    o, lse_of_group = (torch.unflatten(t, 1, (k.shape[1], q.shape[1] // k.shape[1])) for t in (o, lse))
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    for tile in _tiles(q, k, v, mask, window, scale, precision, 1):
        most = tile.scores.amax(dim=-1, keepdim=True)
        most.masked_fill_(most == -math.inf, 0.0)
        weights = tile.scores.sub_(most).exp_()
        total = weights.sum(dim=-1, keepdim=True)
        lse_of_group[tile.items, tile.heads, :, tile.rows] = (most + total.log()).squeeze(-1)
        sums = weights.to(weights_dtype).to(precision).flatten(2, 3) @ tile.values
        o[tile.items, tile.heads, :, tile.rows] = torch.unflatten(sums, 2, weights.shape[2:4]) / total.masked_fill_(total == 0, 1.0)
    return out, lse


def _differentiate(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dout: Tensor,
    dlse: Tensor | None,
    mask: str,
    window: tuple[int | None, int | None] | None,
    scale: float | None,
    layout: str,
    precision: torch.dtype,
    rounded: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:
    """Sums in `precision`; out, weights and the gradients of scores pass through `rounded`."""
    given = (query, key, value)
    results = [torch.zeros(tensor.shape, dtype=precision, device=query.device) for tensor in given]
    q, k, v, do, dq, dk, dv = (t.transpose(1, 2) if layout == "bshd" else t for t in (*given, dout, *results))
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    group = q.shape[1] // k.shape[1]
    do, dq = (torch.unflatten(t, 1, (k.shape[1], group)) for t in (do, dq))
    if dlse is not None:
        dlse = torch.unflatten(dlse, 1, (k.shape[1], group))
    for tile in _tiles(q, k, v, mask, window, scale, precision, 3):
        items, heads, rows, span = tile.items, tile.heads, tile.rows, tile.span
        scores = tile.scores.flatten(2, 3)  # (items, heads, group * rows, span), as all the matrices below
        lse = scores.logsumexp(dim=-1, keepdim=True)
        weights = scores.sub_(lse.masked_fill_(lse == -math.inf, 0.0)).exp_()
        douts = do[items, heads, :, rows].to(precision).flatten(2, 3)
        total = weights.sum(dim=-1, keepdim=True)  # 1, but for what rounding made of a large lse
        outs = ((weights @ tile.values) / total.masked_fill_(total == 0, 1.0)).to(rounded).to(precision)
        delta = (douts * outs).sum(dim=-1, keepdim=True)
        if dlse is not None:
            delta -= dlse[items, heads, :, rows].to(precision).flatten(2, 3)[..., None]
        dscores = (douts @ tile.values.transpose(-1, -2)).sub_(delta).mul_(weights).to(rounded).to(precision)
        dv[items, heads, span] += weights.to(rounded).to(precision).transpose(-1, -2) @ douts
        dk[items, heads, span] += (dscores.transpose(-1, -2) @ tile.queries).mul_(scale)
        dq[items, heads, :, rows] = torch.unflatten((dscores @ tile.keys).mul_(scale), 2, (group, rows.stop - rows.start))
    return results[0], results[1], results[2]


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
