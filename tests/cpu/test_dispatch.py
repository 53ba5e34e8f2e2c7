"""flashgen.attention and flashgen.explain: arguments, choices, plans.

Kernels are replaced by a stand-in that computes attention in PyTorch from an explicit boolean mask, so that what dispatch does with
tensors can be seen without compiling. test_in_the_interpreter runs real ones.
"""

import dataclasses
import json
import logging
import math
import os
import sys
import threading
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import flashgen
from flashgen import dispatch, space
from flashgen.candidate import Candidate
from flashgen.database import Database
from flashgen.device import Device
from flashgen.dispatch import choice as choice_module
from flashgen.dispatch import choose, distance, plan
from flashgen.errors import ArgumentError, ArgumentTypeError, BuildError, LaunchError, UnsupportedError
from flashgen.problem import Problem
from flashgen.record import Measurement, Provenance, Record, Status
from flashgen.render import render
from tests.cpu.torch_kernels import Kernels, close, expected, fresh_planner, run_interpreted, tensors, torch_kernels

H100, H200, A100 = Device.named("h100"), Device.named("h200"), Device.named("a100")
PROBLEM = Problem(batch=4, heads_q=16, heads_kv=16, seqlen_q=4096, seqlen_kv=4096, head_dim_qk=128, head_dim_v=128, mask="causal")


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> plan.Planner:
    """A planner that has seen nothing."""
    return fresh_planner(monkeypatch)


@pytest.fixture
def kernels(fresh: plan.Planner, monkeypatch: pytest.MonkeyPatch) -> Kernels:
    """Kernels that compute in PyTorch."""
    return torch_kernels(fresh, monkeypatch)


def winner(
    problem: Problem = PROBLEM,
    device: Device = H200,
    *,
    candidate: Candidate | None = None,
    median_us: float = 100.0,
    source_sha256: str | None = None,
    triton: str | None = None,
) -> Record:
    """A measured row of today's source and Triton, unless told otherwise. Its candidate is not the default one."""
    if candidate is None:
        default = space.default(problem, device)
        candidate = next(each for each in space.candidates(problem, device) if each != default)
    return Record(
        problem=problem,
        device=device,
        candidate=candidate,
        measurement=Measurement(status=Status.OK, times_us=(median_us,), median_us=median_us),
        provenance=Provenance(
            flashgen="0",
            torch="2",
            triton=triton or choice_module._triton_version(),
            cuda="12.8",
            driver="570",
            gpu=device.name,
            utc="2026-01-01T00:00:00",
        ),
        source_sha256=render(candidate.variant).sha256 if source_sha256 is None else source_sha256,
    )


# ---- results ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize("causal", [False, True, "top_left"])
def test_out_and_lse(kernels: Kernels, dtype: torch.dtype, layout: str, causal: Any) -> None:
    """N03: both diagonals, sequences of different lengths; out is contiguous in the caller's layout and dtype."""
    query, key, value = tensors(head_dim_v=24, dtype=dtype)
    right, right_lse = expected(query, key, value, causal=causal)
    given = (query, key, value) if layout == "bhsd" else tuple(each.transpose(1, 2).contiguous() for each in (query, key, value))
    out, lse = flashgen.attention(*given, causal=causal, layout=layout, return_lse=True)
    assert out.is_contiguous() and out.dtype == dtype and not out.requires_grad
    assert lse.dtype == torch.float32 and lse.shape == (2, 4, 5)
    close(out if layout == "bhsd" else out.transpose(1, 2), right)
    torch.testing.assert_close(lse.double(), right_lse, atol=1e-4, rtol=1e-4)
    assert type(flashgen.attention(*given, causal=causal, layout=layout)) is Tensor


def test_causal_alignment(kernels: Kernels) -> None:
    """N03: for (5, 2) bottom-right leaves rows 0-2 empty and gives row 3 the first value; top-left gives it to row 0."""
    query, key, value = tensors(1, 1, 1, 5, 2, dtype=torch.float32)
    out, lse = flashgen.attention(query, key, value, causal=True, return_lse=True)
    assert (out[0, 0, :3] == 0).all() and (lse[0, 0, :3] == -math.inf).all()
    close(out[0, 0, 3], value[0, 0, 0].double())
    close(flashgen.attention(query, key, value, causal="top_left")[0, 0, 0], value[0, 0, 0].double())


@pytest.mark.parametrize("window", [(256, 0), (-1, 0), (10**9, 0), (None, 0), [256, 0]])
def test_windows_that_hide_no_more_than_causal(kernels: Kernels, window: Any) -> None:
    """N05: spellings of one mask are one problem, and so one kernel and the same bits."""
    query, key, value = tensors(1, 1, 1, 40, 40)
    assert torch.equal(flashgen.attention(query, key, value, window=window), flashgen.attention(query, key, value, causal=True))
    assert len({problem for problem, _ in kernels.launches}) == 1
    query, key, value = tensors(1, 1, 1, 30, 10)
    flashgen.attention(query, key, value, window=(-1, 10**6))
    assert kernels.launches[-1][0].mask == "full" and kernels.launches[-1][0].window == (None, None)


def test_strides(kernels: Kernels) -> None:
    """N22, N27, G03: any strides; what is not contiguous in its last dimension is copied; expanded dimensions work."""
    query, key, value = tensors(2, 4, 4, 8, 8)
    right, _ = expected(query, key, value, causal=True)
    every_second = torch.full((2, 4, 16, 16), math.nan, dtype=torch.float16)
    every_second[:, :, ::2] = key
    spellings = [
        (query, every_second[:, :, ::2], value),
        (query.transpose(1, 2).contiguous().transpose(1, 2), key, value),
        (query.transpose(-1, -2).contiguous().transpose(-1, -2), key, value),
        (query, key.transpose(-1, -2).contiguous().transpose(-1, -2), value.transpose(-1, -2).contiguous().transpose(-1, -2)),
        tuple(torch.stack([query, key, value], 3).unbind(3)),
        tuple(torch.cat([torch.zeros(1, dtype=torch.float16), each.flatten()])[1:].view(each.shape) for each in (query, key, value)),
    ]
    for given in spellings:
        for _ in range(2):
            close(flashgen.attention(*given, causal=True), right)
    one = key[:, :1]
    close(flashgen.attention(query, one.expand_as(key), value, causal=True), expected(query, one.expand_as(key), value, causal=True)[0])


def test_alignment(kernels: Kernels) -> None:
    """T08: what TMA cannot read is another problem, and another signature: a plan for aligned addresses never gets others."""
    query, key, value = tensors(1, 2, 2, 8, 8)
    flashgen.attention(query, key, value)
    assert kernels.launches[-1][0].aligned_16
    storage = torch.zeros(query.numel() + 8, dtype=torch.float16)
    off = storage[1 : 1 + query.numel()].view(query.shape)
    assert off.stride() == query.stride()
    flashgen.attention(off, key, value)
    assert not kernels.launches[-1][0].aligned_16
    odd_rows = torch.zeros(1, 2, 8, 19, dtype=torch.float16)[..., :16]
    flashgen.attention(query, odd_rows, value)
    assert not kernels.launches[-1][0].aligned_16
    odd_dim = tensors(1, 2, 2, 8, 8, head_dim=36, head_dim_v=36)
    flashgen.attention(*odd_dim)
    assert not kernels.launches[-1][0].aligned_16
    flashgen.attention(query, key, torch.zeros(1, 2, 8, 32, dtype=torch.float16)[..., :20])
    assert not kernels.launches[-1][0].aligned_16, "rows of out are 40 bytes"
    for candidate, problem, _ in kernels.builds:
        assert problem.aligned_16 or candidate.variant.load == "pointer"


@pytest.mark.parametrize("shape", [dict(batch=0), dict(seqlen_q=0), dict(batch=0, seqlen_kv=0)])
def test_nothing_asked(kernels: Kernels, shape: dict[str, int]) -> None:
    """N17: empty tensors, and nothing is chosen, built or launched."""
    query, key, value = tensors(**({"heads_q": 8, "seqlen_q": 128, "seqlen_kv": 64, "head_dim_v": 32} | shape))
    out, lse = flashgen.attention(query, key, value, return_lse=True)
    assert out.shape == (*query.shape[:3], 32) and lse.shape == query.shape[:3] and lse.dtype == torch.float32
    assert not kernels.builds and not kernels.launches


def test_no_keys(kernels: Kernels) -> None:
    """Rows that see nothing are 0, with LSE -inf."""
    query, key, value = tensors(seqlen_kv=0)
    out, lse = flashgen.attention(query, key, value, return_lse=True, causal=True)
    assert (out == 0).all() and (lse == -math.inf).all() and not kernels.builds


def test_scale(kernels: Kernels) -> None:
    """By default of head_dim_qk (N25); zero averages; a negative one gets a kernel that scales first."""
    query, key, value = tensors(head_dim=32, head_dim_v=64)
    close(flashgen.attention(query, key, value), expected(query, key, value)[0])
    for scale in (0, 0.0, 1, 0.25, 1e-40, -0.5, -2):
        close(flashgen.attention(query, key, value, scale=scale), expected(query, key, value, scale=scale)[0])
        assert type(kernels.launches[-1][1]) is float
    assert {candidate.variant.scale_first for candidate, _, _ in kernels.builds} == {False, True}
    plain, scaled = (candidate for candidate, _, _ in kernels.builds)
    assert plain.config == scaled.config and dataclasses.replace(scaled.variant, scale_first=False) == plain.variant
    close(
        flashgen.attention(query, key, value, scale=0.0), value.double().mean(2, keepdim=True).repeat_interleave(2, 1).expand(2, 4, 5, 64)
    )


def test_autocast(kernels: Kernels) -> None:
    """I10: tensors of mixed dtypes are cast to autocast's; outside of it they are refused; plans are not mixed up."""
    query, key, value = tensors(dtype=torch.float32)
    for _ in range(2):
        with torch.autocast("cpu", torch.float16):
            out = flashgen.attention(query, key, value.half())
            assert out.dtype == torch.float16
            close(out, expected(query, key, value)[0])
        assert flashgen.attention(query, key, value).dtype == torch.float32
        with pytest.raises(ArgumentTypeError, match=r"different dtypes: query torch.float32, .* value torch.float16"):
            flashgen.attention(query, key, value.half())


# ---- arguments -------------------------------------------------------------------------------------------------------

BAD = [
    (dict(), dict(heads_q=3), ArgumentError, "heads_q is 3.*multiple of heads_kv, 2"),  # N26
    (dict(), dict(heads_q=33), ArgumentError, "heads_q is 33"),
    (dict(), dict(heads_kv=0), ArgumentError, "heads_kv is 0"),
    (dict(window=(-1, -3)), dict(), ArgumentError, "window.*-3"),  # N06
    (dict(window=(-5, 0)), dict(), ArgumentError, "window.*-5"),
    (dict(window=(2.5, 0)), dict(), ArgumentError, "window.*2.5"),
    (dict(window=(True, 0)), dict(), ArgumentError, "window.*True"),
    (dict(window=(1,)), dict(), ArgumentError, "window"),
    (dict(window=5), dict(), ArgumentError, "window"),
    (dict(causal="bottom"), dict(), ArgumentError, "causal is 'bottom'"),
    (dict(causal=None), dict(), ArgumentError, "causal is None"),
    (dict(causal=[]), dict(), ArgumentError, "causal"),
    (dict(causal=torch.tensor(True)), dict(), ArgumentError, "causal is a Tensor"),
    (dict(layout="sbhd"), dict(), ArgumentError, "layout is 'sbhd'"),
    (dict(layout=None), dict(), ArgumentError, "layout"),
    (dict(return_lse="yes"), dict(), ArgumentError, "return_lse"),
    (dict(scale=math.nan), dict(), ArgumentError, "scale is nan"),
    (dict(scale=-math.inf), dict(), ArgumentError, "scale is -inf"),
    (dict(scale=1e300), dict(), ArgumentError, "scale is 1e.300.*float32"),
    (dict(scale=True), dict(), ArgumentTypeError, "scale is True"),
    (dict(scale="1"), dict(), ArgumentTypeError, "scale is '1'"),
    (dict(scale=torch.tensor(1.0)), dict(), ArgumentTypeError, "scale is a tensor"),
    (dict(), dict(dtype=torch.float64), ArgumentTypeError, "query is torch.float64"),
    (dict(), dict(dtype=torch.int32), ArgumentTypeError, "query is torch.int32"),
    (dict(), dict(dtype=torch.bfloat16), UnsupportedError, "bfloat16.*interpreter"),
    (dict(), dict(head_dim=0), ArgumentError, "head_dim_qk is 0"),
    (dict(), dict(head_dim=512), UnsupportedError, "head_dim"),  # N24
    (dict(attn_mask=None), dict(), UnsupportedError, "attn_mask"),  # I15
    (dict(dropout_p=0.1), dict(), UnsupportedError, "dropout_p"),
    (dict(softcap=30.0), dict(), UnsupportedError, "softcap"),
    (dict(alibi_slopes=None), dict(), UnsupportedError, "alibi_slopes"),
    (dict(is_causal=True), dict(), ArgumentTypeError, "is_causal.*causal.*top_left"),
    (dict(no_such=1), dict(), ArgumentTypeError, "no_such"),
]


@pytest.mark.parametrize(("keywords", "shape", "error", "words"), BAD)
def test_bad_arguments(kernels: Kernels, keywords: dict[str, Any], shape: dict[str, Any], error: type[Exception], words: str) -> None:
    """Each is refused by name before anything is compiled, also when plans for its neighbours exist."""
    for window in (None, (1, 0), (2, 0)):
        flashgen.attention(*tensors(), window=window, scale=1.0)
        flashgen.attention(*tensors(), window=window, causal=True)
    before = len(kernels.builds), len(kernels.launches)
    with pytest.raises(error, match=words):
        flashgen.attention(*tensors(**shape), **keywords)
    assert before == (len(kernels.builds), len(kernels.launches))


def test_tensors_that_do_not_fit_together(kernels: Kernels) -> None:
    query, key, value = tensors(heads_q=4, heads_kv=4)
    for given, words in [
        ((query, key[:1], value[:1]), "query has batch size 2 and key 1"),
        ((query, key, value[:1]), "key has batch size 2 and value 1"),
        ((query, key, value[:, :2]), "key has number of heads 4 and value 2"),  # N26
        ((query, key[:, :, :3], value), "key has sequence length 3 and value 7"),
        ((query[..., :8], key, value), "query has head dim 8 and key 16"),
        ((query[0], key, value), r"query has 3 dimensions, \(4, 5, 16\)"),
    ]:
        with pytest.raises(ArgumentError, match=words):
            flashgen.attention(*given)
    with pytest.raises(ArgumentTypeError, match="different dtypes"):
        flashgen.attention(query, key.float(), value)
    with pytest.raises(ArgumentTypeError, match="query on cpu, key on meta, value on cpu"):  # I08
        flashgen.attention(query, key.to("meta"), value)
    with pytest.raises(ArgumentTypeError, match="key is a list"):
        flashgen.attention(query, key.tolist(), value)  # type: ignore[arg-type]
    with pytest.raises(ArgumentTypeError, match="value is None"):
        flashgen.attention(query, key, None)  # type: ignore[arg-type]
    assert not kernels.builds


def test_other_devices(kernels: Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    """I08: never a silent fallback."""
    with pytest.raises(UnsupportedError, match="on meta"):
        flashgen.attention(*tensors(device="meta"))
    monkeypatch.delenv("TRITON_INTERPRET")
    with pytest.raises(UnsupportedError, match=r"on the CPU.*TRITON_INTERPRET"):
        flashgen.attention(*tensors())


class Labelled(Tensor):
    """A subclass, whose meaning flashgen cannot know."""


@pytest.mark.filterwarnings("ignore:`torch.jit.script:DeprecationWarning")  # torch.autograd.forward_ad's own
@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor:UserWarning")
def test_tensors_that_are_more_than_tensors(kernels: Kernels) -> None:
    """I11, G13: each is refused by name, also when plain tensors like it have a plan."""
    query, key, value = tensors(dtype=torch.float32)
    flashgen.attention(query, key, value)
    launched = len(kernels.launches)
    with pytest.raises(UnsupportedError, match=r"query is inside torch.func"):
        torch.vmap(lambda each: flashgen.attention(each, key, value))(query[None])
    with pytest.raises(UnsupportedError, match=r"value is inside torch.func"):
        torch.vmap(lambda each: flashgen.attention(query, key, each))(value[None])
    with pytest.raises(UnsupportedError, match=r"inside torch.func"):
        torch.func.grad(lambda each: flashgen.attention(each, key, value).sum())(query)
    with pytest.raises(UnsupportedError, match=r"inside torch.func"):
        torch.func.jvp(lambda each: flashgen.attention(each, key, value), (query,), (query,))
    with torch.autograd.forward_ad.dual_level():
        flashgen.attention(query, key, value)
        dual = torch.autograd.forward_ad.make_dual(query, torch.ones_like(query))
        with pytest.raises(UnsupportedError, match="query is a dual tensor"):
            flashgen.attention(dual, key, value)
    with pytest.raises(UnsupportedError, match="key is a Labelled"):
        flashgen.attention(query, key.as_subclass(Labelled), value)
    with pytest.raises(UnsupportedError, match="key has layout"):
        flashgen.attention(query, key.to_sparse(), value)
    with torch._subclasses.FakeTensorMode() as mode, pytest.raises(UnsupportedError, match="query is a FakeTensor"):
        flashgen.attention(*(mode.from_tensor(each) for each in (query, key, value)))
    assert len(kernels.launches) == launched + 1
    flashgen.attention(torch.nn.Parameter(query, requires_grad=False), key, value)


@pytest.mark.filterwarnings("ignore:.*nested tensors is in prototype stage.*:UserWarning")
def test_nested_tensors(kernels: Kernels) -> None:
    query, key, value = tensors()
    for layout in (torch.strided, torch.jagged):
        nested = torch.nested.nested_tensor([query[0], query[1]], layout=layout)
        with pytest.raises(UnsupportedError, match=r"query is a [Nn]ested"):
            flashgen.attention(nested, key, value)


# ---- the second call -------------------------------------------------------------------------------------------------


def test_the_second_call_is_a_look_up_and_a_launch(kernels: Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    """T18: nothing is checked, chosen, built or read again, and few functions run."""
    given = tensors()
    flashgen.attention(*given, causal=True)
    for module, name in [(dispatch, "checked_call"), (plan, "choices"), (plan, "build"), (plan, "prepare"), (plan.Planner, "winners")]:
        monkeypatch.setattr(module, name, lambda *_, **__: pytest.fail("done again"))
    (only,) = dispatch._plans.values()
    monkeypatch.setitem(dispatch._plans, next(iter(dispatch._plans)), dataclasses.replace(only, run=lambda *_: None))
    calls: list[str] = []
    sys.setprofile(lambda frame, event, argument: calls.append(event) if event in ("call", "c_call") else None)
    try:
        flashgen.attention(*given, causal=True)
    finally:
        sys.setprofile(None)
    assert calls.count("call") <= 4, "Python functions"
    assert len(calls) <= 30, "functions in all"


def test_every_part_of_a_call_is_in_its_signature(kernels: Kernels) -> None:
    """T13: calls that differ in one thing have plans of their own."""
    query, key, value = tensors(heads_q=4, heads_kv=4, seqlen_q=8, seqlen_kv=8, head_dim=16)
    calls = [
        ((query, key, value), {}),
        ((query, key, value), dict(causal=True)),
        ((query, key, value), dict(causal="top_left")),
        ((query, key, value), dict(window=(2, None))),
        ((query, key, value), dict(window=(2, 0))),
        ((query, key, value), dict(window=(0, 2))),
        ((query, key, value), dict(layout="bshd")),
        ((query, key, value), dict(return_lse=True)),
        ((query, key, value), dict(scale=-1.0)),
        ((query.float(), key.float(), value.float()), {}),
        ((query, key[:, :2], value[:, :2]), {}),
        ((query[:1], key[:1], value[:1]), {}),
        ((query[:, :, :4], key, value), {}),
        ((query, key[:, :, :4], value[:, :, :4]), {}),
        ((query, key, value[..., :8]), {}),
        ((query[..., :8], key[..., :8], value), {}),
        ((query, key, value.transpose(1, 2).contiguous().transpose(1, 2)), {}),
        ((query, key.transpose(1, 2).contiguous().transpose(1, 2), value), {}),
    ]
    for given, keywords in calls:
        flashgen.attention(*given, **keywords)
    assert len(dispatch._plans) == len(calls)
    for given, keywords in calls:
        flashgen.attention(*given, **keywords)
    assert len(dispatch._plans) == len(calls)
    flashgen.attention(query, key, value, scale=1.0)
    flashgen.attention(query, key, value, scale=0.1)
    assert len(dispatch._plans) == len(calls), "the scale's value is no part of it"


def test_kernels_are_shared_by_lengths(kernels: Kernels) -> None:
    """Growing sequences get new plans, not new kernels."""
    for seqlen_kv in range(100, 110):
        flashgen.attention(*tensors(1, 1, 1, 1, seqlen_kv))
    assert len(dispatch._plans) == 10 and len(kernels.builds) == 1


def test_plans_are_bounded(kernels: Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "MOST_PLANS", 3)
    for seqlen_q in range(1, 8):
        flashgen.attention(*tensors(seqlen_q=seqlen_q))
    assert len(dispatch._plans) == 3
    flashgen.attention(*tensors(seqlen_q=1))


def test_threads_share_one_first_call(kernels: Kernels) -> None:
    given = tensors()
    right, _ = expected(*given)
    slow = threading.Event()
    kernels.build_error = lambda candidate: slow.wait(0.2) and None
    results: list[Tensor] = []
    threads = [threading.Thread(target=lambda: results.append(flashgen.attention(*given))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(kernels.builds) == 1 and len(results) == 8
    for out in results:
        close(out, right)


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork.*:DeprecationWarning")
def test_a_forked_child_does_not_wait_for_its_parents_lock(kernels: Kernels) -> None:
    """I16: another thread holds the lock while the process forks; the child calls."""
    given = tensors()
    held, release = threading.Event(), threading.Event()

    def hold() -> None:
        with dispatch._planner._lock:
            held.set()
            release.wait()

    holder = threading.Thread(target=hold)
    holder.start()
    held.wait()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            torch.set_num_threads(1)  # OpenMP's threads do not survive a fork
            dispatch._planner_here()._winners = ()
            flashgen.attention(*given)
            status = 0
        finally:
            os._exit(status)
    release.set()
    holder.join()
    for _ in range(200):
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            break
        threading.Event().wait(0.1)
    else:
        os.kill(child, 9)
        os.waitpid(child, 0)
        pytest.fail("the child waits for ever")
    assert os.waitstatus_to_exitcode(status) == 0


def test_nothing_happens_inside_a_capture(kernels: Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    """I05: a first call is refused before the stream is touched, even before tensors are looked at."""
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    on_gpu = types.SimpleNamespace(is_cuda=True)
    with pytest.raises(UnsupportedError, match="CUDA graph capture"):
        flashgen.attention(on_gpu, on_gpu, on_gpu)  # type: ignore[arg-type]
    assert not kernels.builds


@pytest.mark.filterwarnings("ignore")
def test_torch_compile_breaks_cleanly(kernels: Kernels) -> None:
    """One break, at the call; nothing of flashgen is traced; a demand for no break names flashgen."""
    from torch._dynamo.testing import CompileCounterWithBackend

    counter = CompileCounterWithBackend("eager")
    query, key, value = tensors(dtype=torch.float32)

    def model(query: Tensor) -> Tensor:
        return flashgen.attention(query * 2, key, value, causal=True) + 1

    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    compiled = torch.compile(model, backend=counter)
    for _ in range(3):
        close(compiled(query), model(query).double())
    assert counter.frame_count == 2, "one graph before the call and one after it"
    assert torch._dynamo.utils.counters["frames"]["total"] == 2, "no frame of flashgen was tried"
    with pytest.raises(Exception, match=r"flashgen\.attention launches kernels of its own"):
        torch.compile(model, backend="eager", fullgraph=True)(query)
    torch._dynamo.reset()


# ---- choice ----------------------------------------------------------------------------------------------------------


def test_an_exact_winner() -> None:
    row = winner()
    chosen = choose(PROBLEM, H200, [winner(dataclasses.replace(PROBLEM, batch=8)), row])
    assert (chosen.how, chosen.candidate, chosen.record, chosen.distance) == ("exact", row.candidate, row, 0)
    assert chosen.because == ()


def test_a_device_by_another_name_is_the_same(kernels: Kernels) -> None:
    """O21: identity is the architecture, SMs and memory."""
    renamed = dataclasses.replace(H200, name="NVIDIA H200 (cloud)")
    assert choose(PROBLEM, renamed, [winner()]).how == "exact"
    assert choose(PROBLEM, H100, [winner()]).how == "nearest"


def test_a_winner_whose_source_changed() -> None:
    """T11: it is rendered anew and used as near, and says so; a fresh row not much farther away is better."""
    stale = winner(source_sha256="0" * 64)
    chosen = choose(PROBLEM, H200, [stale])
    assert (chosen.how, chosen.record, chosen.distance) == ("nearest", stale, choice_module.CHANGED_SOURCE)
    assert any("source has changed" in sentence for sentence in chosen.because)
    neighbour = winner(dataclasses.replace(PROBLEM, batch=2))
    chosen = choose(PROBLEM, H200, [stale, neighbour])
    assert chosen.record is neighbour and any("source has changed" in sentence for sentence in chosen.because) is False


def test_a_winner_of_another_triton() -> None:
    """T11: another minor release compiles other code; a patch release does not."""
    ours = choice_module._triton_version().split(".")
    patched = winner(triton=".".join([*ours[:2], "99"]))
    assert choose(PROBLEM, H200, [patched]).how == "exact"
    other = winner(triton="3.99.0")
    chosen = choose(PROBLEM, H200, [other])
    assert (chosen.how, chosen.distance) == ("nearest", choice_module.OTHER_TRITON)
    assert any("Triton 3.99.0" in sentence for sentence in chosen.because)


def test_an_illegal_winner_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stored candidate that does not fit here (a damaged or foreign row) is said to be illegal, and not run."""
    row = winner()
    assert row.candidate is not None
    huge = dataclasses.replace(row.candidate, config=dataclasses.replace(row.candidate.config, block_m=512, block_n=512, num_stages=5))
    chosen = choose(PROBLEM, H200, [winner(candidate=huge)])
    assert chosen.how == "predicted" and not space.violations(chosen.candidate, PROBLEM, H200)
    assert any("not legal here" in sentence for sentence in chosen.because)


def test_the_nearest_winner() -> None:
    near, far = (winner(dataclasses.replace(PROBLEM, seqlen_q=n, seqlen_kv=n)) for n in (2048, 512))
    chosen = choose(PROBLEM, H200, [far, near])
    assert (chosen.how, chosen.record) == ("nearest", near)
    assert chosen.because == ("no winner was measured for this problem on this device",)


def test_a_sibling_device_is_rescaled_by_the_model() -> None:
    """An H100 winner serves an H200, and the time to expect is what the model makes of it."""
    memory_bound = Problem(batch=64, heads_q=8, heads_kv=8, seqlen_q=64, seqlen_kv=8192, head_dim_qk=128, head_dim_v=128)
    row = winner(memory_bound, H100)
    explanation = dispatch.explanation.explained(memory_bound, H200, [row])
    assert (explanation.how, explanation.record, explanation.measured_us) == ("nearest", row, 100.0)
    assert 0 < explanation.distance < 1
    there = flashgen.dispatch.explanation.cost.estimate(row.candidate, memory_bound, H100)
    here = flashgen.dispatch.explanation.cost.estimate(explanation.candidate, memory_bound, H200)
    assert explanation.expected_us == pytest.approx(100.0 * here.time_s / there.time_s)
    assert choose(PROBLEM, A100, [winner()]).how == "predicted", "another architecture says nothing"


@pytest.mark.parametrize(
    ("change", "most"),
    [
        (dict(), 0),
        (dict(return_lse=True), 0.2),
        (dict(dtype="float16"), 0.3),
        (dict(batch=5), 0.2),
        (dict(seqlen_q=4000, seqlen_kv=4000), 0.1),
        (dict(heads_kv=4), 0.5),
        (dict(mask="full"), 2),
        (dict(window=(512, None)), 3),
        (dict(aligned_16=False), 1.1),
        (dict(head_dim_qk=64, head_dim_v=64), math.inf),
        (dict(dtype="float32"), math.inf),
    ],
)
def test_distance(change: dict[str, Any], most: float) -> None:
    """0 for itself alone, the same both ways, and small for small changes."""
    other = dataclasses.replace(PROBLEM, **change)
    away = distance(winner(), other, H200)
    assert away == pytest.approx(distance(winner(other), PROBLEM, H200))
    assert away <= most and (away == 0) == (other == PROBLEM)
    if most == math.inf:
        assert away > choice_module.LIMIT


def test_without_winners_the_model_chooses() -> None:
    chosen = choose(PROBLEM, H200, [])
    assert chosen.how == "predicted" and chosen.record is None
    assert not space.violations(chosen.candidate, PROBLEM, H200)
    assert chosen.because == (
        "no winner was measured for this problem on this device",
        "none of 0 known winners is usable within distance 4",
    )
    odd = dataclasses.replace(PROBLEM, seqlen_q=4001, seqlen_kv=3999, batch=3)
    assert not space.violations(choose(odd, H200, []).candidate, odd, H200)


def test_the_default_comes_last() -> None:
    each = list(dispatch.choices(PROBLEM, H200, [winner()]))
    assert [choice.how for choice in each][:2] == ["exact", "predicted"]
    assert len({choice.candidate for choice in each}) == len(each)
    assert space.default(PROBLEM, H200) in {choice.candidate for choice in each}


def test_a_negative_scale_changes_every_choice() -> None:
    for choice in dispatch.choices(PROBLEM, H200, [winner()], negative_scale=True):
        assert choice.candidate.variant.scale_first


def test_the_interpreter_is_offered_portable_kernels_alone() -> None:
    """It runs no Gluon: a winner that is written in it is said to be left out."""
    row = winner()
    hopper = winner(candidate=space.default(PROBLEM, H200), median_us=50.0)
    assert hopper.candidate is not None and hopper.candidate.variant.backend == "hopper"
    each = list(dispatch.choices(PROBLEM, H200, [hopper, row], portable=True))
    assert {choice.candidate.variant.backend for choice in each} == {"triton"}
    assert (each[0].how, each[0].candidate, each[1].how) == ("exact", row.candidate, "predicted")
    assert any("which Triton's interpreter does not run" in sentence for sentence in each[0].because)


def test_a_call_in_the_interpreter_tries_no_hopper_kernel(kernels: Kernels, caplog: pytest.LogCaptureFixture) -> None:
    given = tensors(batch=1, seqlen_q=64, seqlen_kv=64, head_dim=64, head_dim_v=64)
    with caplog.at_level(logging.WARNING, "flashgen"):
        close(flashgen.attention(*given), expected(*given)[0])
    assert [candidate.variant.backend for candidate, _, _ in kernels.builds] == ["triton"]
    assert dispatch.explain(*given).candidate == kernels.builds[0][0]
    assert not any("next choice" in record.message for record in caplog.records)


@pytest.mark.parametrize("error", [BuildError("ptxas: too many registers"), LaunchError("kernel image is invalid for this driver")])
def test_a_failing_winner_gives_way(kernels: Kernels, fresh: plan.Planner, caplog: pytest.LogCaptureFixture, error: Exception) -> None:
    """T23: one warning, the next choice, and the winner stays where it is; explain tells."""
    given = tensors()
    problem = dispatch.arguments.checked_call(*given, causal=True, window=None, layout="bhsd", return_lse=False, float16_dq=False).problem
    row = winner(problem)
    fresh._winners = (row,)
    broken = lambda candidate: error if candidate == row.candidate else None  # noqa: E731
    kernels.build_error, kernels.launch_error = (broken, lambda _: None) if isinstance(error, BuildError) else (lambda _: None, broken)
    assert dispatch.explain(*given, causal=True).how == "exact"
    with caplog.at_level(logging.WARNING, "flashgen"):
        close(flashgen.attention(*given, causal=True), expected(*given, causal=True)[0])
        flashgen.attention(*(each.clone().transpose(0, 1).contiguous().transpose(0, 1) for each in given), causal=True)
    told = [entry.getMessage() for entry in caplog.records if str(error) in entry.getMessage()]
    assert len(told) == 1
    assert [candidate for candidate, _, _ in kernels.builds].count(row.candidate) == 1, "tried once"
    explanation = dispatch.explain(*given, causal=True)
    assert explanation.how == "predicted" and any(str(error) in sentence for sentence in explanation.because)
    assert fresh.winners() == (row,)
    dispatch.reset()
    fresh._winners = (row,)
    assert dispatch.explain(*given, causal=True).how == "exact", "reset gives it another chance"


def test_all_choices_fail(kernels: Kernels) -> None:
    kernels.build_error = lambda candidate: BuildError("ptxas is missing")
    for _ in range(2):
        with pytest.raises(BuildError, match=r"no choice runs on NVIDIA H200 with torch .*ptxas is missing"):
            flashgen.attention(*tensors())
    assert not dispatch._plans


def test_what_is_said_in_the_log(kernels: Kernels, fresh: plan.Planner, caplog: pytest.LogCaptureFixture) -> None:
    """Never silent: one warning that nothing was measured; a winner is information; each signature speaks once."""
    with caplog.at_level(logging.INFO, "flashgen"):
        for seqlen in (5, 6, 7, 5, 6):
            flashgen.attention(*tensors(seqlen_q=seqlen))
    warnings = [entry for entry in caplog.records if entry.levelno == logging.WARNING]
    assert len(warnings) == 1 and "predicted" in warnings[0].getMessage() and "tune" in warnings[0].getMessage()
    assert len([entry for entry in caplog.records if entry.levelno == logging.INFO]) == 3


def test_a_new_winner_is_used_after_reset(
    fresh: plan.Planner, kernels: Kernels, monkeypatch: pytest.MonkeyPatch, own_database: Path
) -> None:
    """Winners come from the user's database, are read once, and read anew after reset."""
    monkeypatch.setenv("FLASHGEN_DATABASE", str(own_database))
    fresh._winners = None
    given = tensors()
    flashgen.attention(*given)
    problem = kernels.launches[-1][0]
    row = winner(problem)
    database = Database.open()
    database.add([row])
    flashgen.attention(*given)
    assert kernels.builds[-1][0] != row.candidate
    dispatch.reset()
    flashgen.attention(*given)
    assert kernels.builds[-1][0] == row.candidate and dispatch.explain(*given).how == "exact"
    own_database.unlink()  # S04
    flashgen.attention(*given)
    assert dispatch.explain(*given).how == "exact"


@pytest.mark.parametrize("content", [b"", b"no database at all" * 999, None])
def test_a_broken_database(
    fresh: plan.Planner, kernels: Kernels, monkeypatch: pytest.MonkeyPatch, own_database: Path, content: bytes | None
) -> None:
    """S01: attention works whatever lies there."""
    if content is None:
        own_database.mkdir()
    else:
        own_database.write_bytes(content)
    monkeypatch.setenv("FLASHGEN_DATABASE", str(own_database))
    fresh._winners = None
    given = tensors()
    close(flashgen.attention(*given), expected(*given)[0])


# ---- explain ---------------------------------------------------------------------------------------------------------


def test_explain_a_problem() -> None:
    database = Database.memory()
    row = winner(median_us=123.4)
    database.add([row])
    explanation = flashgen.explain(PROBLEM, device="h200", database=database)
    text, data = str(explanation), json.loads(json.dumps(explanation.to_dict()))
    assert "exact" in text and "123.4 us" in text and str(row.candidate) in text and "NVIDIA H200" in text
    assert data["how"] == "exact" and data["measured_us"] == 123.4 and data["row"]["key"] == row.key
    assert data["predicted_us"] >= data["bound_us"] > 0 and data["distance"] == 0
    neighbour = dataclasses.replace(PROBLEM, batch=8)
    text = str(flashgen.explain(neighbour, device=H200, database=database))
    assert "nearest" in text and "no winner was measured for this problem" in text and "expected" in text
    text = str(flashgen.explain(dataclasses.replace(PROBLEM, head_dim_qk=64), device="a100", database=database))
    assert "predicted" in text


def test_explain_tensors(kernels: Kernels) -> None:
    """The same arguments give the same story, and nothing is built."""
    explanation = flashgen.explain(*tensors(), causal=True, window=(3, 0), scale=-1.0, return_lse=True)
    assert explanation.problem.window == (3, None) and explanation.problem.return_lse and explanation.candidate.variant.scale_first
    assert not kernels.builds
    empty = flashgen.explain(*tensors(batch=0))
    assert empty.how == "empty" and empty.candidate is None and "nothing to compute" in str(empty)
    json.dumps(empty.to_dict())
    with pytest.raises(ArgumentTypeError, match="device"):
        flashgen.explain(*tensors(), device="h200")
    for given, keywords in [(tensors()[:2], {}), ((), dict(causal=True)), ((), dict(window=(1, 0))), ((), dict(return_lse=True))]:
        with pytest.raises(ArgumentTypeError, match="beside a Problem"):
            flashgen.explain(PROBLEM, *given, device="h200", **keywords)
    with pytest.raises(UnsupportedError, match="head_dim"):
        flashgen.explain(dataclasses.replace(PROBLEM, head_dim_qk=512), device="h200")
    if not torch.cuda.is_available():
        with pytest.raises(UnsupportedError, match="no CUDA device"):
            flashgen.explain(PROBLEM)


# ---- real kernels ----------------------------------------------------------------------------------------------------


def test_in_the_interpreter(tmp_path: Path) -> None:
    """The whole way with generated kernels."""
    run_interpreted("interpreted_dispatch.py", tmp_path / "new.db")


@pytest.fixture(autouse=True)
def no_leftovers() -> Iterator[None]:
    yield
    torch.set_grad_enabled(True)
