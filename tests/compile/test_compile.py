"""Every variant compiles for sm_90, and the defaults for sm_80 too, by the Triton that is installed. No GPU is needed.

Prints the compiler's figures, so that a release of Triton that begins to spill shows in the log. A hopper kernel must not spill, nor
may ptxas have any of its warnings about warpgroup products (C7510 to C7518).
"""

import functools
import itertools
import re
from dataclasses import fields, replace

import pytest
import triton

from flashgen import space
from flashgen.build import CompilePool, binary, build, ptxas_log
from flashgen.candidate import CHOICES, Candidate, Variant
from flashgen.device import Device
from flashgen.errors import BuildError
from flashgen.problem import Problem
from flashgen.record import Resources


def problems() -> list[Problem]:
    """Together they ask for every combination of what a problem decides: mask, padding, LSE."""
    masks = ({"mask": "full"}, {"mask": "causal"}, {"mask": "causal", "window": (256, 0)})
    shape = {"batch": 4, "heads_q": 16, "heads_kv": 4, "seqlen_q": 1000, "seqlen_kv": 1000}
    return [
        Problem(**shape, **mask, head_dim_qk=head_dim, head_dim_v=head_dim, return_lse=return_lse)  # type: ignore[arg-type]
        for mask, head_dim, return_lse in itertools.product(masks, (64, 72), (False, True))
    ]


def defaults(problem: Problem, device: Device) -> list[Candidate]:
    """The default, and the default that scales first: the search does not choose that flag, a call with a negative scale does."""
    default = space.default(problem, device)
    return [default, replace(default, variant=replace(default.variant, scale_first=True))]


def candidates(problem: Problem, device: Device) -> list[Candidate]:
    """The defaults, and every other variant with its first config, whose small tiles compile fastest."""
    first = {candidate.variant: candidate for candidate in reversed(space.candidates(problem, device))}
    return list((first | {candidate.variant: candidate for candidate in defaults(problem, device)}).values())


H200, A100 = Device.named("h200"), Device.named("a100")
CASES = [
    pytest.param(candidate, problem, device, id=f"{device.arch}-{candidate.variant.name}")
    for device, chosen in ((H200, candidates), (A100, defaults))  # what sm_80 compiles, sm_90 compiles too
    for problem in problems()
    for candidate in chosen(problem, device)
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


@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    ("candidate", "problem", "device"),
    [case for case in CASES if case.values[0].variant.backend == "hopper"],  # type: ignore[union-attr]
)
def test_machine_code_of_hopper_kernels(candidate: Candidate, problem: Problem, device: Device) -> None:
    outcome = compiled()[device.arch, candidate]
    assert isinstance(outcome, Resources), outcome
    kernel = build(candidate, problem, device)
    code = binary.sass(kernel.compiled)
    assert "HGMMA" in code and "UTMALDG" in code
    assert binary.spills_between_products(code) == 0
    assert outcome.spill_bytes == 0
    assert not re.findall(r"C75\d\d.*", ptxas_log(kernel.compiled))


def test_every_choice_is_a_case() -> None:
    """A field of Variant that is added later has no value that is never compiled."""
    variants = [case.values[0].variant for case in CASES]  # type: ignore[union-attr]
    for field in fields(Variant):
        assert {getattr(variant, field.name) for variant in variants} == set(CHOICES.get(field.name, (False, True))), field.name
