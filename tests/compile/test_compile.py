"""Every variant compiles for sm_90, and the defaults for sm_80 too, by the Triton that is installed. No GPU is needed.

Prints the compiler's figures, so that a release of Triton that begins to spill shows in the log. The machine code of hopper kernels
is read: ptxas may not have serialised their products, nor put spills between them.
"""

import functools
import itertools
import re
from dataclasses import fields, replace

import pytest
import triton

from flashgen import space
from flashgen.build import CompilePool, binary, build, constants_of, ptxas_log
from flashgen.candidate import CHOICES, Candidate, Variant
from flashgen.device import Device
from flashgen.errors import BuildError
from flashgen.problem import Problem
from flashgen.record import Resources

MASKS = ({"mask": "full"}, {"mask": "causal"}, {"mask": "causal", "window": (256, 0)})
Case = tuple[Candidate, Problem]


def portable(device: Device) -> list[Case]:
    """Kernels in Triton: the defaults, and on Hopper as many others as bring each two choices together in one, of each variant the first
    config, whose small tiles compile fastest.

    Their problems ask for every combination of what a problem decides: mask, padding, LSE.
    """
    shape = {"batch": 4, "heads_q": 16, "heads_kv": 4, "seqlen_q": 1000, "seqlen_kv": 1000}
    cases: dict[Candidate, Problem] = {}
    legal: list[Case] = []
    for mask, dim, return_lse in itertools.product(MASKS, (64, 72), (False, True)):
        problem = Problem(**shape, **mask, head_dim_qk=dim, head_dim_v=dim, return_lse=return_lse)  # type: ignore[arg-type]
        # The search does not choose to scale first, a call with a negative scale does.
        cases |= dict.fromkeys(both_scales(space.portable_default(problem, device)), problem)
        if device.has_tma:
            first: dict[Variant, Candidate] = {}
            for candidate in space.candidates(problem, device):
                if candidate.variant.backend == "triton":
                    first.setdefault(candidate.variant, candidate)
            legal += [(candidate, problem) for candidate in first.values()]
    return covered(cases, legal)


def specialised(device: Device) -> list[Case]:
    """Kernels in Gluon: the defaults of each mask and head dim, for many queries and for few, whose heads are packed, and as many others as
    bring each two choices together in one."""
    shape = {"heads_q": 16, "heads_kv": 4, "seqlen_q": 1024}
    cases: dict[Candidate, Problem] = {}
    legal: list[Case] = []
    # With few tiles their order is not a choice. Keys that are no multiple of a block are cut in more places.
    for mask, dim, batch, seqlen_kv in itertools.product(MASKS, (64, 72, 128, 256), (4, 1), (1024, 1048)):
        problem = Problem(**shape, **mask, batch=batch, seqlen_kv=seqlen_kv, head_dim_qk=dim, head_dim_v=dim)  # type: ignore[arg-type]
        if batch == 4 and seqlen_kv == 1024 and dim != 72:
            few = replace(problem, seqlen_q=17)
            cases |= {space.default(each, device): each for each in (problem, few)}
        first: dict[object, Candidate] = {}
        for candidate in space.candidates(problem, device):
            if candidate.variant.backend == "hopper":
                config = candidate.config
                first[candidate.variant, config.block_m, config.packed_heads] = candidate  # the last one has the most keys in a block
        for candidate, return_lse in itertools.product(itertools.chain(*map(both_scales, first.values())), (False, True)):
            stored = replace(candidate, variant=replace(candidate.variant, store_lse=return_lse))
            legal.append((stored, replace(problem, return_lse=return_lse)))
    return covered(cases, legal)


def backward(device: Device) -> list[Case]:
    """Kernels of the backward pass, which have three functions each: defaults of every mask at head dims 64 and 128, two more with padding
    and the gradient of the LSE, and those with one loop for all blocks. On sm_80 the causal ones."""
    shape = {"direction": "backward", "batch": 4, "heads_q": 16, "heads_kv": 4, "seqlen_q": 1000, "seqlen_kv": 1000}
    cases: dict[Candidate, Problem] = {}
    for mask, dim in [*itertools.product(MASKS, (64, 128)), *itertools.product(MASKS[1:2], (72, 256))]:
        problem = Problem(**shape, **mask, head_dim_qk=dim, head_dim_v=dim, return_lse=dim == 72)  # type: ignore[arg-type]
        if not device.has_tma and mask != MASKS[1]:
            continue
        default = space.portable_default(problem, device)
        cases[default] = problem
        if device.has_tma and dim == 64:
            cases[replace(default, variant=replace(default.variant, masked_apart=False))] = problem
    return list(cases.items())


def specialised_backward(device: Device) -> list[Case]:
    """Kernels of the backward pass in Gluon, with two slots: the default of each mask at head dims 64, 128 and 256, every structure and
    tile without a mask, and the causal ones that are deterministic or have sums in float16."""
    shape = {"direction": "backward", "batch": 4, "heads_q": 16, "heads_kv": 4, "seqlen_q": 1024, "seqlen_kv": 1024}
    cases: dict[Candidate, Problem] = {}
    for mask, dim in itertools.product(MASKS, (64, 128, 256)):
        problem = Problem(**shape, **mask, head_dim_qk=dim, head_dim_v=dim, return_lse=dim == 64)  # type: ignore[arg-type]
        cases[space.default(problem, device)] = problem
        if mask == MASKS[1]:
            cases[space.default(replace(problem, deterministic=True), device)] = problem
        if mask == MASKS[2]:
            continue
        legal = [each for each in space.candidates(replace(problem, float16_dq=True), device) if each.variant.backend == "hopper"]
        legal = [candidate for candidate in legal if candidate.config.num_stages == 2]
        cases |= {candidate: problem for candidate in legal if mask == MASKS[0] or candidate.variant.float16_dq}
    return list(cases.items())


def both_scales(candidate: Candidate) -> list[Candidate]:
    """The candidate as the search offers it, and as it is for negative scales."""
    return [candidate, replace(candidate, variant=replace(candidate.variant, scale_first=True))]


def covered(cases: dict[Candidate, Problem], legal: list[Case]) -> list[Case]:
    """The cases, and legal ones on top until each two choices that stand together in a legal one stand together in some case."""
    pairs_of = {case: pairs(*case) for case in legal}
    missing = frozenset[object]().union(*pairs_of.values()).difference(*(pairs(*case) for case in cases.items()))
    while missing:
        best = max((case for case in legal if case[0] not in cases), key=lambda case: len(pairs_of[case] & missing))
        cases |= [best]
        missing -= pairs_of[best]
    return list(cases.items())


def pairs(candidate: Candidate, problem: Problem) -> frozenset[object]:
    """Each two of the choices that decide the machine code of a forward kernel."""
    choices = {field.name: getattr(candidate.variant, field.name) for field in fields(Variant)} | {"dim": problem.head_dim_qk}
    if candidate.variant.backend == "hopper":
        config = candidate.config
        choices |= {"block_m": config.block_m, "packed_heads": config.packed_heads, "cuts": constants_of(candidate, problem)["CUTS"]}
    return frozenset(itertools.combinations(choices.items(), 2))


H200, A100 = Device.named("h200"), Device.named("a100")
CASES = [
    pytest.param(candidate, problem, device, id=f"{device.arch}-{problem.head_dim_qk}-{candidate.variant.name}")
    # What sm_80 compiles, sm_90 compiles too.
    for device, chosen in (
        (H200, portable),
        (H200, specialised),
        (H200, backward),
        (H200, specialised_backward),
        (A100, portable),
        (A100, backward),
    )
    for candidate, problem in chosen(device)
]


@functools.cache
def compiled() -> dict[tuple[str, Candidate], Resources | BuildError]:
    """What came of every case, by architecture and candidate; they are compiled on all cores at once."""
    outcomes: dict[tuple[str, Candidate], Resources | BuildError] = {}
    for arch, cases in itertools.groupby((case.values for case in CASES), key=lambda values: values[2].arch):  # type: ignore[union-attr]
        with CompilePool(time_limit_s=300) as pool:
            for candidate, problem, device in cases:
                pool.submit(candidate, problem, device)  # type: ignore[arg-type]
            outcomes |= {(arch, candidate): outcome for candidate, outcome in pool.results()}
    return outcomes


@pytest.mark.timeout(1200)  # the first case waits for all
@pytest.mark.parametrize(("candidate", "problem", "device"), CASES)
def test_compiles(candidate: Candidate, problem: Problem, device: Device, capsys: pytest.CaptureFixture[str]) -> None:
    outcome = compiled()[device.arch, candidate]
    assert isinstance(outcome, Resources), outcome
    with capsys.disabled():
        figures = f"{outcome.registers} registers, {outcome.spill_bytes} bytes spilled, {outcome.smem_bytes} bytes shared"
        print(f"\n{device.arch}, triton {triton.__version__}: {candidate}: {figures}", end=" ")
    assert outcome.registers > 0
    old = tuple(map(int, triton.__version__.split(".")[:2])) < (3, 9)
    if problem.direction == "backward" and candidate.variant.backend == "triton" and problem.head_dim_qk in (64, 128) and old:
        assert outcome.spill_bytes == 0  # of all three functions: dk and dv keep two sums in registers


@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    ("candidate", "problem", "device"),
    [case for case in CASES if case.values[0].variant.backend == "hopper"],  # type: ignore[union-attr]
)
def test_machine_code_of_hopper_kernels(candidate: Candidate, problem: Problem, device: Device, capsys: pytest.CaptureFixture[str]) -> None:
    """Warpgroup products and TMA loads, and neither of the two that make them slow: ptxas's waits (C7510 to C7518), spills in loops."""
    outcome = compiled()[device.arch, candidate]
    assert isinstance(outcome, Resources), outcome
    specialised = [function for function in build(candidate, problem, device).functions if function.described]
    assert specialised
    between = 0
    for function in specialised:
        code = binary.sass(function.compiled)
        between += binary.spills_between_products(code)
        assert "HGMMA" in code and "UTMALDG" in code
        assert not re.findall(r"C75\d\d.*", ptxas_log(function.compiled))
    with capsys.disabled():
        print(f"\n{triton.__version__}: {candidate}: {between} loads and stores of spills between products", end=" ")
    # Outside the loops up to 48 bytes were seen with Triton 3.6; the ptxas of 3.9 (13.4) needs more registers for the same code.
    old = tuple(map(int, triton.__version__.split(".")[:2])) < (3, 9)
    # The largest backward tile spills some numbers of the loop, and is the fastest at head dim 64 all the same. A forward kernel at head
    # dim 256 that stores the LSE reloads one number in each step.
    large = problem.direction == "backward" and candidate.config.block_m == 128
    wide = problem.direction == "forward" and problem.head_dim_v == 256 and candidate.variant.store_lse
    assert outcome.spill_bytes <= ((128 if large else 64) if old else 256)
    assert between <= (16 if large else 1 if wide else 0) or not old


def test_packed_heads_change_nothing_but_boxes() -> None:
    """Without a mask a kernel of packed heads is that of one head, but for where the second warpgroup's queries begin, 4 after the first
    ones or 64: rows of several heads lie in shared memory as those of one do."""
    problem = Problem(batch=1, heads_q=16, heads_kv=1, seqlen_q=1024, seqlen_kv=1024, head_dim_qk=128, head_dim_v=128)
    config = replace(space.default(problem, H200).config, block_m=128, num_warps=8)
    texts = []
    for packed_heads in (1, 16):
        candidate = Candidate(variant=space.default(problem, H200).variant, config=replace(config, packed_heads=packed_heads))
        ptx = build(candidate, problem, H200).functions[0].compiled.asm["ptx"]
        texts.append([line for line in ptx.splitlines() if not re.match(r"\s*(\.(loc|file|b8|b32|b64)|//)", line)])
    changed = [(one.split(), other.split()) for one, other in zip(*texts, strict=True) if one != other]
    assert changed
    assert all(one[:-1] == other[:-1] and (one[-1], other[-1]) == ("64;", "4;") for one, other in changed)


def test_every_choice_is_a_case() -> None:
    """A field of Variant that is added later has no value that is never compiled."""
    variants = [case.values[0].variant for case in CASES]  # type: ignore[union-attr]
    for field in fields(Variant):
        assert {getattr(variant, field.name) for variant in variants} == set(CHOICES.get(field.name, (False, True))), field.name
