"""Run by test_backward_kernels.py with TRITON_INTERPRET=1: backward kernels on the CPU, against the float64 oracle.

Prints one line of JSON for each case: what it was, and what is wrong with it ("" if nothing is).
"""

import json
import math
import random
import sys
from dataclasses import replace

import torch

from flashgen import space
from flashgen.candidate import Candidate
from flashgen.check import BackwardCase, check_backward, judge_backward, prepare_backward
from flashgen.device import Device
from flashgen.launch import BackwardLaunch, bind_backward
from flashgen.problem import Problem

torch.set_num_threads(1)
H200 = Device.named("h200")
SHAPES = [(1, 1), (1, 50), (50, 1), (17, 33), (65, 40), (50, 20), (64, 64), (3, 0), (0, 3)]
MASKS = [
    dict(),
    dict(mask="causal"),
    dict(mask="causal_top_left"),
    dict(mask="causal", window=(9, None)),
    dict(window=(7, 12)),
    dict(window=(0, 0)),
    dict(window=(None, 5)),
]
# Shapes, masks and head dims that each find faults of their own come together by chance, but always in the same way.
DIMS = [(16, 16), (40, 80), (80, 40), (8, 8), (64, 64), (72, 16)]
LARGE = [(192, 128), (256, 256)]


def problems() -> list[Problem]:
    chance = random.Random("gradients")
    sizes = [(*shape, mask, chance.choice(DIMS)) for shape in SHAPES for mask in chance.sample(MASKS, 3)]
    sizes += [(20, 37, MASKS[1], dims) for dims in LARGE]
    return [
        Problem(
            direction="backward",
            batch=2 if seqlen_q * seqlen_kv < 600 else 1,
            heads_q=6 if place % 2 else 2,
            heads_kv=2,
            seqlen_q=seqlen_q,
            seqlen_kv=seqlen_kv,
            head_dim_qk=dims[0],
            head_dim_v=dims[1],
            dtype="float16" if place % 3 else "float32",
            layout=chance.choice(["bhsd", "bshd"]),
            return_lse=chance.random() < 0.5,
            aligned_16=chance.random() < 0.5 and all(dim % 8 == 0 for dim in dims),
            **mask,
        )
        for place, (seqlen_q, seqlen_kv, mask, dims) in enumerate(sizes)
    ]


def candidates(problem: Problem) -> list[Candidate]:
    """Small tiles, so that there are several of each kind of block, and the default's loops or the other ones."""
    default = space.portable_default(problem, H200)
    tile = replace(default.config, block_m=16, block_n=32 if problem.head_dim_qk < 100 else 16)
    apart = replace(default.variant, masked_apart=problem.layout == "bhsd")
    return [replace(default, config=tile, variant=apart)]


def bound(candidate: Candidate, case: BackwardCase) -> BackwardLaunch:
    return bind_backward(candidate, case.problem, case.given, H200)


def awkward() -> None:
    """Every shape, with views whose surroundings are NaN; scales of 0 and below 0 too."""
    for place, problem in enumerate(problems()):
        case = prepare_backward(problem, "cpu", seed=place, scale=[None, None, -0.3, 0.0][place % 4])
        for candidate in candidates(problem):
            result = check_backward(bound(candidate, case), case)
            say(f"{candidate} {problem} scale {case.scale:.3g}", "" if result.ok else result.message)


SMALL = Problem(
    direction="backward",
    batch=1,
    heads_q=6,
    heads_kv=2,
    seqlen_q=40,
    seqlen_kv=50,
    head_dim_qk=16,
    head_dim_v=32,
    dtype="float32",
    mask="causal",
)


def expanded_dout() -> None:
    """G02: the gradient of out.sum(dim=-1) with weights a column has strides of 0, all but the last."""
    case = prepare_backward(SMALL, "cpu", seed=1)
    column = case.given.dout[:1, :1, :1]
    given = case.given._replace(dout=column.expand(case.given.dout.shape))
    candidate = candidates(SMALL)[0]
    results = []
    for dout in (given.dout, given.dout.contiguous()):
        case.poison()
        given = given._replace(dout=dout)
        bind_backward(candidate, SMALL, given, H200)(*given, *case.gradients, case.scale)
        results.append([gradient.clone() for gradient in case.gradients])
    same = all(torch.equal(one, other) for one, other in zip(*results))
    say("expanded dout", "" if same else "is not what a copy gives")


def some_gradients() -> None:
    """G08: a gradient that nobody needs is not written, and its function not launched; one launch serves all choices and strides."""
    case = prepare_backward(SMALL, "cpu", seed=2)
    launch = bound(candidates(SMALL)[0], case)
    for wanted, launched in [
        ((True, False, False), 2),
        ((False, True, False), 2),
        ((False, False, True), 2),
        ((True, False, True), 3),
        ((False, False, False), 0),
    ]:
        case.poison()
        given = [gradient if want else None for gradient, want in zip(case.gradients, wanted)]
        launch(*case.given, *given, case.scale)
        result = judge_backward(*given, case)
        message = "" if result.ok else result.message
        if not all(gradient.isnan().all() for gradient, want in zip(case.gradients, wanted) if not want):
            message += " wrote a gradient that nobody asked for"
        steps = list(launch.steps.values())[-1]
        if len(steps) != launched:
            message += f" launched {len(steps)} functions, not {launched}"
        say(f"gradients {wanted}", message)
    contiguous = [torch.full(gradient.shape, math.nan) for gradient in case.gradients]
    launch(*case.given, *contiguous, case.scale)
    result = judge_backward(*contiguous, case)
    say("other strides", "" if result.ok else result.message)


def rows_without_a_key() -> None:
    """G05: the log-sum-exp of a row without a key is -inf; whatever its gradient, nothing comes of it."""
    problem = replace(SMALL, seqlen_q=50, seqlen_kv=20, return_lse=True)
    case = prepare_backward(problem, "cpu", seed=3)
    assert case.given.dlse is not None
    case.given.dlse.masked_fill_(case.given.lse == -math.inf, -math.inf)
    case.poison()
    bound(candidates(problem)[0], case)(*case.given, *case.gradients, case.scale)
    result = judge_backward(*case.gradients, case)
    say("rows without a key", "" if result.ok else result.message)


def say(what: str, message: str) -> None:
    print(json.dumps([what, message]), flush=True)


for test in sys.argv[1:]:
    globals()[test]()
