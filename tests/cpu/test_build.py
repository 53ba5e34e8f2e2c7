"""Compiling for GPUs that are not here, in this process and in a pool; generated modules and their cache; standalone files."""

import dataclasses
import hashlib
import inspect
import logging
import os
import shutil
import signal
import stat
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
import triton

from flashgen import build as build_package
from flashgen import errors
from flashgen.build import CompilePool, binary, build, cache_info, clear_cache, constants_of, export, modules, ptxas_log, sass_mix
from flashgen.candidate import Candidate, Config, Variant
from flashgen.device import Device
from flashgen.errors import ArgumentError, BuildError, BuildTimeoutError, OutOfResourcesError
from flashgen.problem import Problem
from flashgen.render import render

H200, A100 = Device.named("h200"), Device.named("a100")
PROBLEM = Problem(batch=1, heads_q=4, heads_kv=2, seqlen_q=256, seqlen_kv=256, head_dim_qk=64, head_dim_v=64, mask="causal")
ROOT = Path(build_package.__file__).parents[2]


def candidate(variant: Variant | None = None, **numbers: int | None) -> Candidate:
    variant = variant or Variant(mask="causal", load="tma")
    config = {"block_m": 64, "block_n": 32, "num_warps": 4, "num_stages": 2, **numbers}
    return Candidate(variant=variant, config=Config(**config))


def backward_candidate(split_roles=False, fused=True, float16_dq=False, **numbers):
    structure = dict(fused=fused, split_roles=split_roles, float16_dq=float16_dq)
    variant = Variant(family="backward", backend="hopper", load="tma", mask="causal", **structure)
    return Candidate(variant=variant, config=Config(**(dict(block_m=64, block_n=128, num_warps=8, num_stages=2) | numbers)))


def hopper_candidate(variant: Variant | None = None, **numbers: int | None) -> Candidate:
    variant = variant or Variant(backend="hopper", mask="causal", load="tma", order="pv_first", longest_first=True)
    config = {"block_m": 192, "block_n": 128, "num_warps": 12, "num_stages": 5, "persistent": True, **numbers}
    return Candidate(variant=variant, config=Config(**config))


@pytest.fixture(autouse=True)
def forget_folders():
    """The folders of the caches are chosen once a process; here once a test."""
    yield
    modules.modules_dir.cache_clear()
    modules.compiled_dir.cache_clear()


@pytest.fixture
def ptxas(tmp_path, monkeypatch):
    """A function that puts a shell script in place of ptxas, with an empty cache so that it is called."""

    def install(script: str) -> None:
        real = triton.backends.nvidia.compiler.get_ptxas(90)
        path = tmp_path / "ptxas"
        path.write_text(
            f"#!/bin/sh\nREAL={real.path}\n"
            f'case "$*" in *--version*) echo "Cuda compilation tools, release {real.version}, V{real.version}.0"; exit 0;; esac\n'
            f'for word; do case "$word" in *.ptx) PTX=$word;; esac; done\n{script}\n'
        )
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
        monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
        for name in ("TRITON_PTXAS_PATH", "TRITON_PTXAS_BLACKWELL_PATH"):
            monkeypatch.setenv(name, str(path))

    return install


def ended(pid: int, seconds: float = 5.0) -> bool:
    """Whether a process is gone, or is a zombie that nobody has collected yet."""
    for _ in range(int(seconds * 20)):
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except (FileNotFoundError, ProcessLookupError):
            return True
        time.sleep(0.05)
    return False


# ---- one kernel ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("device", "load", "product"), [(H200, "tma", "HGMMA"), (H200, "pointer", "HGMMA"), (A100, "pointer", "HMMA")])
def test_compiles_for_a_device_that_is_not_here(device, load, product):
    kernel = build(candidate(Variant(mask="causal", load=load)), PROBLEM, device)
    resources = kernel.resources
    assert 0 < resources.registers <= 255
    assert 0 < resources.smem_bytes <= device.smem_per_block_bytes
    assert len(resources.binary_sha256) == 64
    assert sass_mix(kernel)[product] > 0
    log = ptxas_log(kernel.compiled)
    assert f"Used {resources.registers} registers" in log
    assert f"{resources.spill_bytes} bytes stack frame" in log


def test_resources_without_cuobjdump_are_the_same(monkeypatch):
    kernel = build(candidate(), PROBLEM, H200)
    expected = binary.resources(kernel.compiled)
    monkeypatch.setattr(binary, "_tool", lambda *arguments, **more: None)
    assert binary.resources(kernel.compiled) == expected
    with pytest.raises(BuildError, match="nvdisasm"):
        sass_mix(kernel)


def test_equal_code_launched_alike_has_one_hash():
    """The search drops candidates whose binary it has seen: caps that do not bind change nothing, a larger grid does."""
    plain = build(candidate(maxnreg=168), PROBLEM, H200).resources
    assert build(candidate(maxnreg=255), PROBLEM, H200).resources.binary_sha256 == plain.binary_sha256
    assert build(candidate(maxnreg=168, persistent=True), PROBLEM, H200).resources.binary_sha256 != plain.binary_sha256
    assert build(candidate(maxnreg=168, block_n=64), PROBLEM, H200).resources.binary_sha256 != plain.binary_sha256


def test_alignment_and_width_reach_the_code():
    """T08: a kernel for aligned tensors copies 16 bytes at a time; one for others must not. Wide offsets are 64-bit parameters."""
    pointer = candidate(Variant(mask="causal", load="pointer"))
    aligned = build(pointer, PROBLEM, A100).compiled.asm["ptx"]
    other = build(pointer, dataclasses.replace(PROBLEM, aligned_16=False), A100).compiled.asm["ptx"]
    wide = build(pointer, PROBLEM, A100, wide_offsets=True).compiled.asm["ptx"]
    assert "cp.async.cg.shared.global" in aligned and ", 0x10" in aligned
    assert "cp.async.cg.shared.global" not in other
    assert wide.count(".param .u64") == aligned.count(".param .u64") + 12


@pytest.mark.parametrize(
    ("numbers", "kind", "words"),
    [
        ({"num_warps": 3}, BuildError, "num_warps is 3; it must be a power of two"),
        ({"num_warps": 64}, OutOfResourcesError, "2048 threads; a block has at most 1024"),
        ({"num_warps": 128}, OutOfResourcesError, "4096 threads"),
        ({"block_n": 48}, BuildError, "block_n is 48; it must be a power of two"),
        ({"maxnreg": 256}, OutOfResourcesError, "maxnreg is 256; a thread has at most 255"),
    ],
)
def test_numbers_that_no_device_launches_are_refused_before_compiling(monkeypatch, numbers, kind, words):
    """T02"""
    monkeypatch.setattr(triton, "compile", lambda *arguments, **options: pytest.fail("compiled"))
    with pytest.raises(kind, match=words):
        build(candidate(**numbers), PROBLEM, H200)


@pytest.mark.parametrize(
    ("numbers", "words"),
    [
        ({"block_m": 256, "num_warps": 16}, "block_m is 256; it must be 64 or 128 or 192"),
        ({"block_n": 32}, "block_n is 32; it must be 64 or 128"),
        ({"q_stages": 3}, "q_stages is 3; it must be 1 or 2"),
        ({"num_warps": 4}, "num_warps is 4; it must be 12"),
        ({"maxnreg": 200}, "maxnreg is 200; .* it must be None"),
        ({"num_stages": 1}, "num_stages is 1; .* needs at least 2 slots"),  # a block that one warpgroup skips waits beside one that it sees
        ({"problem": {"dtype": "float32"}}, "needs 16-bit elements"),
        ({"problem": {"aligned_16": False}}, "16-byte aligned"),
        ({"problem": {"head_dim_v": 264}}, "head dims of at most 256; .* has more"),
        ({"device": A100}, "needs sm_90; NVIDIA A100"),
    ],
)
def test_numbers_that_a_hopper_kernel_is_not_written_for_are_refused_before_compiling(monkeypatch, numbers, words):
    """With too few slots it would wait for ever."""
    monkeypatch.setattr(triton, "compile", lambda *arguments, **options: pytest.fail("compiled"))
    numbers = dict(numbers)
    problem, device = dataclasses.replace(PROBLEM, **numbers.pop("problem", {})), numbers.pop("device", H200)
    with pytest.raises(BuildError, match=words):
        build(hopper_candidate(**numbers), problem, device)


def test_a_hopper_kernel_compiles():
    """Its registers are those of the warpgroup that uses most, not the 128 that 512 threads start with."""
    kernel = build(hopper_candidate(), PROBLEM, H200)
    resources = kernel.resources
    assert kernel.compiled.metadata.num_warps == 16
    assert 128 < resources.registers <= 168
    assert resources.smem_bytes == kernel.compiled.metadata.shared <= H200.smem_per_block_bytes
    mix = sass_mix(kernel)
    assert mix["HGMMA"] > 0 and mix["UTMALDG"] > 0
    log = ptxas_log(kernel.compiled)
    assert "Used 128 registers" in log and f"{resources.spill_bytes} bytes stack frame" in log


def test_a_hopper_kernel_depends_on_the_mask():
    """The diagonal cuts one block of a warpgroup, or two where the lengths differ; without a mask the last keys do, or nothing."""
    shifted = dataclasses.replace(PROBLEM, seqlen_kv=300)
    first, second = constants_of(hopper_candidate(), PROBLEM), constants_of(hopper_candidate(), shifted)
    assert (first["CUTS"], first["SKIPS"]) == (1, 1)
    assert second == first | {"CUTS": 2}
    full = hopper_candidate(Variant(backend="hopper", load="tma", order="pv_first"))
    for seqlen_kv, cuts in ((256, 0), (300, 1)):
        problem = dataclasses.replace(PROBLEM, mask="full", seqlen_kv=seqlen_kv)
        assert constants_of(full, problem) == first | {"CUTS": cuts, "SKIPS": 0}
    left = dataclasses.replace(PROBLEM, mask="full", window=(20, None))
    assert constants_of(full, left) == first | {"CUTS": 1, "SKIPS": 0}  # the last block is cut on its left


def test_equal_code_with_another_schedule_is_another_kernel():
    plain, grouped = build(hopper_candidate(), PROBLEM, H200), build(hopper_candidate(head_group=4), PROBLEM, H200)
    assert plain.compiled.asm["cubin"] == grouped.compiled.asm["cubin"]
    assert plain.resources.binary_sha256 != grouped.resources.binary_sha256


def test_a_backward_hopper_kernel_compiles_and_its_schedule_counts():
    """Of its functions one has descriptors of all that it reads and writes; the scratch between them moves by TMA there, and by pointers in
    the others."""
    problem = dataclasses.replace(PROBLEM, direction="backward")
    plain, grouped = (build(backward_candidate(head_group=group), problem, H200) for group in (1, 4))
    assert [function.name.removeprefix("attention_backward_") for function in plain.functions] == ["delta", "dkdv", "dq_convert"]
    assert [list(function.described) for function in plain.functions] == [
        [],
        ["q", "k", "v", "dout", "rows_tiles", "dq_tiles", "dk", "dv"],
        [],
    ]
    assert plain.functions[1].described["dq_tiles"] == [64, 32]  # half of the columns of 64 rows, as each warpgroup adds them
    for one, other in zip(plain.functions, grouped.functions):
        assert one.compiled.asm["cubin"] == other.compiled.asm["cubin"]
    assert plain.resources.binary_sha256 != grouped.resources.binary_sha256
    mix = sass_mix(plain)
    assert mix["HGMMA"] > 0 and mix["UTMALDG"] > 0 and mix["UTMAREDG"] > 0


def test_sums_in_float16_move_as_float16():
    """Scales and bounds beside them are float32."""
    kernel = build(backward_candidate(float16_dq=True, block_m=128), dataclasses.replace(PROBLEM, direction="backward"), H200)
    names = [function.name.removeprefix("attention_backward_") for function in kernel.functions]
    assert names == ["bounds", "delta", "dkdv", "dq_convert"]
    loop = kernel.functions[2]
    assert (loop.described["dq_tiles"], loop.described["scales_tiles"]) == ([64, 64], [128])
    types = [function.compiled.src.signature for function in kernel.functions]
    assert types[2]["dq_tiles"].startswith("tensordesc<fp16[64, 64]")
    assert (types[1]["dq_sum"], types[3]["dq_sum"], types[1]["bounds"], types[3]["dq_scales"]) == ("*fp16", "*fp16", "*fp32", "*fp32")
    assert sass_mix(kernel)["UTMAREDG"] > 0


@pytest.mark.parametrize(
    ("numbers", "words"),
    [
        ({"block_m": 192}, "block_m is 192; it must be 64 or 128"),
        ({"block_n": 64}, "block_n is 64; it must be 128"),
        ({"num_warps": 4}, "num_warps is 4; it must be 8"),
        ({"q_stages": 2}, "q_stages is 2; it must be 1"),
        ({"split_roles": True}, "block_n is 128; it must be 64"),
        ({"split_roles": True, "block_n": 64}, "fused and split_roles are both set"),
        ({"fused": False, "float16_dq": True}, "float16_dq is set and fused is not"),
    ],
)
def test_numbers_that_a_backward_hopper_kernel_is_not_written_for_are_refused(numbers, words):
    with pytest.raises(BuildError, match=words):
        build(backward_candidate(**numbers), dataclasses.replace(PROBLEM, direction="backward"), H200)


def test_serialised_products_are_a_build_error():
    """128 columns of K and V and 192 rows want more registers than there are: C7512."""
    problem = dataclasses.replace(PROBLEM, head_dim_qk=128, head_dim_v=128, mask="full")
    variant = Variant(backend="hopper", load="tma", order="qk_first")
    kernel = build(hopper_candidate(variant, num_stages=2), problem, H200)
    assert "C7512" in ptxas_log(kernel.compiled)
    with pytest.raises(BuildError, match="ptxas serialised the products"):
        kernel.resources  # noqa: B018 - a property that raises
    assert binary.spills_between_products(binary.sass(kernel.compiled)) > 0


def test_a_hopper_kernel_is_not_interpreted(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(BuildError, match="Gluon kernels are not interpreted"):
        build(hopper_candidate(), PROBLEM, H200)


def test_too_much_shared_memory_names_both_numbers():
    """T01"""
    small = dataclasses.replace(H200, name="a small device", smem_per_block_bytes=4096)
    with pytest.raises(OutOfResourcesError, match=r"needs \d+ bytes of shared memory; a block of a small device has 4096"):
        build(candidate(), PROBLEM, small)


def test_too_few_registers_fail_with_what_ptxas_said():
    """T03"""
    with pytest.raises(BuildError, match=r"maxnreg 24 does not compile: .*[Rr]egister"):
        build(candidate(block_m=128, block_n=128, maxnreg=24), PROBLEM, H200)


def test_failing_ptxas_leaves_its_words(ptxas):
    """T03"""
    ptxas("echo 'ptxas fatal   : everything is wrong' >&2; exit 255")
    with pytest.raises(BuildError, match="ptxas fatal   : everything is wrong") as caught:
        build(candidate(), PROBLEM, H200)
    assert not isinstance(caught.value, OutOfResourcesError)
    assert len(str(caught.value)) < 1500


@pytest.mark.parametrize("raised", [RuntimeError("PassManager::run failed"), OSError(28, "No space left on device"), IndexError("map::at")])
def test_failures_of_the_compiler_are_build_errors(monkeypatch, raised):
    """T15 has the full disk."""

    def fail(*arguments, **options):
        raise raised

    monkeypatch.setattr(triton, "compile", fail)
    with pytest.raises(BuildError, match=r"does not compile: .*(PassManager|No space|map::at)"):
        build(candidate(), PROBLEM, H200)


def test_bugs_pass(monkeypatch):
    def fail(*arguments, **options):
        raise TypeError("a bug")

    monkeypatch.setattr(triton, "compile", fail)
    with pytest.raises(TypeError, match="a bug"):
        build(candidate(), PROBLEM, H200)


def test_building_does_not_initialise_cuda():
    """I16"""
    script = """
        import sys
        from flashgen.build import build
        from flashgen.candidate import Candidate, Config, Variant
        from flashgen.device import Device
        from flashgen.problem import Problem

        problem = Problem(batch=1, heads_q=4, heads_kv=2, seqlen_q=256, seqlen_kv=256, head_dim_qk=64, head_dim_v=64, mask="causal")
        config = Config(block_m=64, block_n=32, num_warps=4, num_stages=2)
        build(Candidate(variant=Variant(mask="causal", load="tma"), config=config), problem, Device.named("h200")).resources
        assert "torch" not in sys.modules or not sys.modules["torch"].cuda.is_initialized()
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(script)], check=True, env=dict(os.environ, PYTHONPATH=str(ROOT)))


# ---- generated modules -------------------------------------------------------------------------------------------------------


def test_a_module_whose_file_is_deleted_still_compiles(monkeypatch, tmp_path):
    """T20"""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    source = render(Variant(mask="causal", load="tma"))
    module = modules.load(source)
    Path(module.__file__).unlink(missing_ok=True)
    assert "def attention_forward" in inspect.getsource(module.attention_forward.fn)
    assert build(candidate(block_m=16, block_n=16, num_warps=1), PROBLEM, A100).resources.registers > 0


def test_two_versions_of_a_variant_live_side_by_side():
    """T20"""
    source = render(Variant())
    changed = dataclasses.replace(source, text=source.text + "VERSION = 2\n")
    first, second = modules.load(source), modules.load(changed)
    assert first.__file__ != second.__file__
    assert second.VERSION == 2 and not hasattr(first, "VERSION")
    assert modules.load(source) is first
    assert Path(second.__file__).read_text() == changed.text


def test_a_damaged_file_is_written_anew(monkeypatch, tmp_path):
    monkeypatch.setenv("FLASHGEN_CACHE", str(tmp_path))
    modules.modules_dir.cache_clear()
    path = modules._published("flashgen_x.py", "x = 1\n")
    for damage in (b"x =", b"", b"\xff\xfe\x00"):
        path.write_bytes(damage)
        assert modules._published("flashgen_x.py", "x = 1\n").read_text() == "x = 1\n"


def test_processes_publish_into_one_folder_while_it_is_emptied(monkeypatch, tmp_path):
    """T15: readers see whole files or none, and no temporary file stays."""
    monkeypatch.setenv("FLASHGEN_CACHE", str(tmp_path))
    modules.modules_dir.cache_clear()
    folder = modules.modules_dir()
    text = "x = 1\n" * 5000
    script = "from flashgen.build import modules\nfor _ in range(300): modules._published('flashgen_x.py', 'x = 1\\n' * 5000)"
    children = [subprocess.Popen([sys.executable, "-c", script], env=dict(os.environ, PYTHONPATH=str(ROOT))) for _ in range(4)]
    while any(child.poll() is None for child in children):
        for path in folder.glob("flashgen_*.py"):
            try:
                assert path.read_text() == text
                path.unlink()
            except FileNotFoundError:
                pass
        time.sleep(0.002)
    assert [child.returncode for child in children] == [0] * 4
    assert [path.name for path in folder.iterdir() if path.name != "flashgen_x.py"] == []


def test_a_folder_that_cannot_be_written_gives_one_warning(monkeypatch, tmp_path, caplog):
    """T16: a file stands where the folder should be, which stops root too."""
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("FLASHGEN_CACHE", str(tmp_path / "file" / "cache"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    modules.modules_dir.cache_clear()
    with caplog.at_level(logging.WARNING):
        for version in (3, 4):
            source = render(Variant())
            modules.load(dataclasses.replace(source, text=source.text + f"VERSION = {version}\n"))
    assert [record.message for record in caplog.records if "cannot be used" in record.message] == [
        record.message for record in caplog.records
    ]
    assert len(caplog.records) == 1
    assert modules.modules_dir().parent == tmp_path / f"flashgen-{os.getuid()}"
    assert modules.modules_dir().parent.stat().st_mode & 0o077 == 0


@pytest.mark.parametrize("obstacle", ["link", "open to others"])
def test_a_temporary_folder_of_someone_else_is_not_used(monkeypatch, tmp_path, obstacle):
    """T16"""
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    taken = tmp_path / f"flashgen-{os.getuid()}"
    if obstacle == "link":
        taken.symlink_to(elsewhere)
    else:
        taken.mkdir()
        taken.chmod(0o777)
    (tmp_path / "file").write_text("")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    folder = modules._writable_dir(tmp_path / "file" / "cache", "modules")
    assert taken not in folder.parents and elsewhere not in folder.parents
    assert folder.parent.stat().st_mode & 0o077 == 0


def test_triton_gets_another_folder_where_its_own_cannot_be_used(monkeypatch, tmp_path, caplog):
    """T16: an empty TRITON_CACHE_DIR makes Triton raise, and so does a home that is no folder."""
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("HOME", str(tmp_path / "file"))
    monkeypatch.setenv("TRITON_CACHE_DIR", "")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    modules.compiled_dir.cache_clear()
    with triton.knobs.cache.scope():
        assert build(candidate(block_m=16, block_n=16, num_warps=1), PROBLEM, A100).resources.registers > 0
        assert tmp_path in Path(triton.knobs.cache.dir).parents
    assert len([record for record in caplog.records if "cannot be used" in record.message]) == 1


def test_cache_can_be_read_and_cleared(monkeypatch, tmp_path):
    monkeypatch.setenv("FLASHGEN_CACHE", str(tmp_path))
    modules.modules_dir.cache_clear()
    (modules.modules_dir() / "unrelated.txt").write_text("stays")
    modules._published("flashgen_x.py", "x = 1\n")
    assert (cache_info().modules_path, cache_info().modules, cache_info().modules_bytes) == (tmp_path / "modules", 2, 11)
    assert clear_cache() == 6
    assert [path.name for path in modules.modules_dir().iterdir()] == ["unrelated.txt"]


# ---- the pool ------------------------------------------------------------------------------------------------------------------


def test_pool_gives_what_build_gives():
    good, bad, deep = candidate(), candidate(num_warps=64), candidate(Variant(mask="causal", load="pointer"))
    with CompilePool(workers=2) as pool:
        assert list(pool.results()) == []
        for each in (good, bad, deep):
            pool.submit(each, PROBLEM, H200)
        assert pool.pending == 3
        results = dict(pool.results())
        assert pool.pending == 0 and list(pool.results(wait=False)) == []
    assert set(results) == {good, bad, deep}
    assert isinstance(results[bad], OutOfResourcesError)
    assert results[good] == build(good, PROBLEM, H200).resources
    assert results[deep] == build(deep, PROBLEM, H200).resources


def test_a_hanging_compiler_is_killed_with_its_children(ptxas, tmp_path):
    """T04: ptxas ignores SIGTERM and sleeps an hour for one candidate; the others are not held up."""
    ptxas(f"""
        if grep -q maxnreg "$PTX"; then
            trap '' TERM INT HUP
            echo $$ > {tmp_path}/pid
            sleep 3600 &
            echo $! > {tmp_path}/grandchild
            wait
        fi
        exec "$REAL" "$@"
    """)
    hanging, sound = candidate(maxnreg=200), [candidate(), candidate(block_n=64)]
    begin = time.monotonic()
    with CompilePool(workers=2, time_limit_s=20) as pool:
        for each in (hanging, *sound):
            pool.submit(each, PROBLEM, H200)
        results = dict(pool.results())
        assert isinstance(results[hanging], BuildTimeoutError)
        assert "did not compile within 20 s" in str(results[hanging])
        assert all(results[each].registers > 0 for each in sound)
        for name in ("pid", "grandchild"):
            assert ended(int((tmp_path / name).read_text())), f"{name} still runs"
    assert time.monotonic() - begin < 90


def test_a_crashing_compiler_takes_nothing_with_it(ptxas):
    ptxas('if grep -q maxnreg "$PTX"; then kill -SEGV $PPID; sleep 5; fi; exec "$REAL" "$@"')
    crashing, sound = candidate(maxnreg=200), candidate()
    with CompilePool(workers=1) as pool:
        pool.submit(crashing, PROBLEM, H200)
        pool.submit(sound, PROBLEM, H200)
        results = dict(pool.results())
    assert type(results[crashing]) is BuildError
    assert "ended with signal SIGSEGV" in str(results[crashing])
    assert results[sound].registers > 0


def test_a_killed_pool_reports_and_starts_again(ptxas, tmp_path):
    ptxas(f'if grep -q maxnreg "$PTX"; then echo $$ > {tmp_path}/pid; exec sleep 3600; fi; exec "$REAL" "$@"')
    with CompilePool(workers=1, time_limit_s=120) as pool:
        pool.submit(candidate(maxnreg=200), PROBLEM, H200)
        while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text():
            assert list(pool.results(wait=False)) == []
            time.sleep(0.05)
        os.kill(pool._foreman._process.pid, signal.SIGKILL)
        ((_, result),) = pool.results()
        assert type(result) is BuildError and "ended with status -9" in str(result)
        pool.submit(candidate(), PROBLEM, H200)
        ((_, result),) = pool.results()
        assert result.registers > 0
        os.kill(int((tmp_path / "pid").read_text()), signal.SIGKILL)


def test_the_death_of_the_caller_ends_every_compiler(ptxas, tmp_path):
    ptxas(f"echo $$ > {tmp_path}/new && mv {tmp_path}/new {tmp_path}/pid; exec sleep 3600")
    script = f"""
        import os, signal, time
        from flashgen.build import CompilePool
        from flashgen.candidate import Candidate, Config, Variant
        from flashgen.device import Device
        from flashgen.problem import Problem

        problem = Problem(batch=1, heads_q=4, heads_kv=2, seqlen_q=256, seqlen_kv=256, head_dim_qk=64, head_dim_v=64)
        pool = CompilePool(workers=1)
        pool.submit(Candidate(config=Config(block_m=64, block_n=32, num_warps=4, num_stages=2)), problem, Device.named("h200"))
        while not os.path.exists("{tmp_path}/pid"):
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGKILL)
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(script)], env=dict(os.environ, PYTHONPATH=str(ROOT)), timeout=120)
    assert ended(int((tmp_path / "pid").read_text()))


def test_every_build_error_has_a_name_that_the_pool_can_send():
    for kind in (BuildError, *BuildError.__subclasses__()):
        assert getattr(errors, kind.__name__) is kind


# ---- standalone files -----------------------------------------------------------------------------------------------------------

STANDALONE = {
    "causal": (Variant(mask="causal", load="tma", store_lse=True), {"mask": "causal", "return_lse": True}),
    "window": (Variant(mask="window", load="pointer", store_lse=True), {"window": (20, 7), "return_lse": True, "layout": "bshd"}),
    "padded": (
        Variant(mask="causal", load="pointer", padded=True, scale_first=True),
        {"mask": "causal_top_left", "seqlen_q": 128, "head_dim_qk": 40, "head_dim_v": 24, "dtype": "float32"},
    ),
}


@pytest.fixture(scope="module")
def standalone(tmp_path_factory):
    """The source file of each of STANDALONE."""
    folder = tmp_path_factory.mktemp("standalone")
    files = {}
    for name, (variant, fields) in STANDALONE.items():
        problem = Problem(
            **{"batch": 1, "heads_q": 4, "heads_kv": 2, "seqlen_q": 256, "seqlen_kv": 256, "head_dim_qk": 32, "head_dim_v": 32}
            | {"dtype": "float16"}
            | fields
        )
        config = {"block_m": 32, "block_n": 16, "num_warps": 4, "num_stages": 2, "persistent": name == "causal"}
        (files[name],) = export(Candidate(variant=variant, config=Config(**config)), problem, H200, folder / name)
    return files


def test_standalone_files_compute_without_flashgen(standalone, tmp_path):
    """In Triton's interpreter, from a folder where no flashgen can be imported; lengths and heads are not those it was made for."""
    script = """
        import importlib.util, math, sys
        import torch

        files = dict(word.split("=") for word in sys.argv[1:])

        def load(name):
            spec = importlib.util.spec_from_file_location(name, files[name])
            module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
            return module

        def reference(q, k, v, scale, visible):
            k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
            scores = (q.double() @ k.double().transpose(-1, -2) * scale).masked_fill(~visible, -math.inf)
            return torch.softmax(scores, -1).nan_to_num() @ v.double(), torch.logsumexp(scores, -1)

        def inputs(module, sq, skv):
            make = lambda heads, s, d: torch.randn(2, heads, s, d, dtype=module.DTYPE)
            return make(2, sq, module.HEAD_DIM_QK), make(1, skv, module.HEAD_DIM_QK), make(1, skv, module.HEAD_DIM_V)

        def close(got, expected, tolerance):
            torch.testing.assert_close(got.double(), expected, rtol=0, atol=tolerance)

        torch.manual_seed(0)
        sq, skv = 35, 41
        i, j = torch.arange(sq)[:, None], torch.arange(skv)[None, :]
        diagonal = skv - sq

        causal = load("causal")
        q, k, v = inputs(causal, sq, skv)
        out, lse = causal.attention(q, k, v)
        expected, expected_lse = reference(q, k, v, 32**-0.5, j <= i + diagonal)
        close(out, expected, 2e-3)
        close(lse, expected_lse, 1e-3)
        out, lse = causal.attention(q, k[:, :, :0], v[:, :, :0])
        assert (out == 0).all() and (lse == -math.inf).all()
        assert causal.attention(q[:, :, :0], k, v)[0].shape == (2, 2, 0, 32)

        window = load("window")
        q, k, v = inputs(window, sq, skv)
        out, lse = window.attention(*(x.transpose(1, 2) for x in (q, k, v)))
        expected, expected_lse = reference(q, k, v, 32**-0.5, (j >= i + diagonal - 20) & (j <= i + diagonal + 7))
        close(out.transpose(1, 2), expected, 2e-3)
        close(lse, expected_lse, 1e-3)

        padded = load("padded")
        q, k, v = inputs(padded, sq, skv)
        close(padded.attention(q, k, v, scale=-0.3), reference(q, k, v, -0.3, j <= i)[0], 1e-5)

        def refused(kind, words, *arguments, **more):
            try:
                causal.attention(*arguments, **more)
            except kind as error:
                assert words in str(error), error
            else:
                raise AssertionError(f"not refused: {words}")

        q, k, v = inputs(causal, sq, skv)
        refused(ValueError, "key", q, k.float(), v)
        refused(ValueError, "value", q, k, v[:1])
        refused(ValueError, "not a multiple", q[:, :1], k.expand(2, 2, skv, 32), v.expand(2, 2, skv, 32))
        refused(ValueError, "scale", q, k, v, scale=-1.0)
        refused(ValueError, "scale", q, k, v, scale=math.nan)
        refused(ValueError, "16 bytes", torch.randn(2, 2, sq, 33, dtype=torch.float16)[..., 1:], k, v)
        refused(NotImplementedError, "no_grad", q.clone().requires_grad_(), k, v)
        assert not any(name.startswith("flashgen") for name in sys.modules)
    """
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {"TRITON_INTERPRET": "1"}
    if path := os.environ.get("PYTHONPATH"):  # of another Triton, but not of flashgen
        environment["PYTHONPATH"] = os.pathsep.join(part for part in path.split(os.pathsep) if not Path(part, "flashgen").exists())
    blocked = "import sys; sys.modules['flashgen'] = None\n" + textwrap.dedent(script).replace(
        'assert not any(name.startswith("flashgen") for name in sys.modules)',
        'assert [name for name in sys.modules if name.startswith("flashgen")] == ["flashgen"]',
    )
    arguments = [f"{name}={path}" for name, path in standalone.items()]
    subprocess.run([sys.executable, "-c", blocked, *arguments], check=True, cwd=tmp_path, env=environment)


def test_standalone_files_are_tidy(standalone, tmp_path):
    """Also that of the hopper variant with the longest name."""
    variant = Variant(
        backend="hopper",
        mask="window",
        load="tma",
        order="qk_first",
        ping_pong=True,
        lazy_rescale=True,
        longest_first=True,
        padded=True,
        scale_first=True,
        store_lse=True,
    )
    problem = dataclasses.replace(PROBLEM, window=(128, None), head_dim_v=72, return_lse=True)
    hopper = export(hopper_candidate(variant, block_m=128, num_warps=8, num_stages=2), problem, H200, tmp_path)
    ruff = shutil.which("ruff") or Path(sys.executable).with_name("ruff")
    if not Path(ruff).exists():
        pytest.skip("ruff is not installed")
    files = [str(path) for path in (*standalone.values(), *hopper)]
    config = ["--config", str(ROOT / "pyproject.toml")]
    checked = subprocess.run([ruff, "check", *config, *files], capture_output=True, text=True)
    assert checked.returncode == 0, checked.stdout
    formatted = subprocess.run([ruff, "format", "--diff", *config, *files], capture_output=True, text=True)
    assert formatted.returncode == 0, formatted.stdout


def test_a_standalone_file_says_how_to_write_it_again(standalone):
    head = standalone["window"].read_text().partition("import math")[0]
    assert "flashgen generate --dtype fp16 --batch 1 --heads-q 4 --heads-kv 2 --seqlen 256 --head-dim 32" in head
    assert "--layout bshd --return-lse --device h200 --out DIR" in head
    assert not any(line.startswith("import flashgen") or "from flashgen" in line for line in standalone["window"].read_text().splitlines())


def test_export_writes_what_is_asked_for(tmp_path):
    files = export(candidate(), PROBLEM, H200, tmp_path / "new", emit=("sass", "source", "ptx", "ttgir"))
    assert [path.suffix for path in files] == [".py", ".ttgir", ".ptx", ".sass"]
    assert {path.stem for path in files} == {"attention_bf16_causal_d64_sm_90"}
    assert "HGMMA" in files[3].read_text() and "wgmma" in files[2].read_text() and "ttg." in files[1].read_text()
    first = [hashlib.sha256(path.read_bytes()).hexdigest() for path in files[:1]]
    again = export(candidate(), PROBLEM, H200, tmp_path / "again")
    assert [hashlib.sha256(path.read_bytes()).hexdigest() for path in again] == first


def test_export_refuses_unknown_kinds(tmp_path):
    with pytest.raises(ArgumentError, match="emit is 'cubin'; it must be among source, ttgir, ptx, sass"):
        export(candidate(), PROBLEM, H200, tmp_path, emit=("source", "cubin"))
    assert list(tmp_path.iterdir()) == []
