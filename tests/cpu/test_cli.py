"""The command line: options, answers, errors, exit codes."""

import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
from rich.console import Console
from typer.testing import CliRunner

from flashgen.cli import answer as answers
from flashgen.cli import app
from flashgen.cli.options import DatabaseOptions, DeviceOptions, ProblemOptions
from flashgen.cli.progress import Live
from flashgen.database import Database
from flashgen.device import Device
from flashgen.errors import ArgumentError, BuildError, UnsupportedError
from flashgen.problem import Problem
from flashgen.record import Record, Status
from flashgen.search.outcome import Budget, Ended, Outcome, Staged, Started, Tried
from tests.cpu import rows

PROBLEM = ["--seqlen", "4096", "--head-dim", "128", "--heads", "16", "--causal", "--batch", "4"]


def run(*arguments: str, input: str | None = None) -> tuple[int, str, str]:
    """Exit code, stdout, stderr. Bugs raise."""
    result = CliRunner().invoke(app, list(arguments), input=input, catch_exceptions=False, env={"COLUMNS": "300", "NO_COLOR": "1"})
    return result.exit_code, result.stdout, result.stderr


def answer(*arguments: str) -> Any:
    code, out, err = run(*arguments, "--json")
    assert code == 0, err
    return json.loads(out)


def refused(*arguments: str) -> str:
    """The one line that says what is wrong with the usage."""
    code, out, err = run(*arguments)
    assert code == 2, (out, err)
    assert out == ""
    return err


@pytest.fixture
def filled(own_database: Path) -> Path:
    Database.open(own_database).add(rows.search(30) + rows.predictions(3, rows.problem(batch=1)))
    return own_database


# ---- help ------------------------------------------------------------------------------------------------------------


def commands() -> dict[str, Any]:
    group = typer.main.get_command(app)
    found: dict[str, Any] = {}
    for name, each in group.commands.items():  # type: ignore[attr-defined]
        inner = getattr(each, "commands", None)
        found |= {f"{name} {sub}": leaf for sub, leaf in inner.items()} if inner else {name: each}
    return found


def test_every_command_is_there() -> None:
    assert set(commands()) >= {"model", "tune", "generate", "explain", "winners", "report", "bench", "doctor", "demo"}
    assert {name for name in commands() if name.startswith("db ")} == {
        f"db {name}" for name in ("export", "import", "merge", "prune", "path")
    }


@pytest.mark.parametrize("name", sorted(commands()))
def test_help_has_an_example_and_json(name: str) -> None:
    code, out, _ = run(*name.split(), "--help")
    assert code == 0
    assert f"Example: flashgen {name}" in out
    assert "--json" in out


@pytest.mark.parametrize("name", sorted(commands()))
def test_examples_parse(name: str) -> None:
    """What --help shows as an example is accepted by the parser."""
    command = commands()[name]
    words = command.epilog.removeprefix(f"Example: flashgen {name}").split()
    command.make_context(name, words, resilient_parsing=False)


def test_help_loads_nothing_heavy() -> None:
    """I16: --help comes at once, without CUDA, and opens no database."""
    code = (
        "import sys; from flashgen.cli import app\n"
        "try: app(['--help'])\n"
        "except SystemExit: pass\n"
        "heavy = {'torch', 'triton', 'optuna', 'sqlalchemy', 'plotly', 'jinja2', 'numpy'} & set(sys.modules)\n"
        "sys.exit(f'loaded {heavy}' if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert not Path(os.environ["FLASHGEN_DATABASE"]).exists()


def test_version_and_no_arguments() -> None:
    assert run("--version")[1].startswith("flashgen ")
    assert "Usage" in "".join(run()[1:])


def test_unknown_commands_and_options() -> None:
    assert "tun" in refused("tun")
    assert "--seqlenn" in refused("model", "--seqlenn", "3")


# ---- from options to a problem -------------------------------------------------------------------------------------


def problems(**options: Any) -> list[Problem]:
    return ProblemOptions(**options).problems()


def test_one_problem() -> None:
    assert ProblemOptions(seqlen="4096", head_dim="128", heads="16", causal=True, batch="4").problem() == rows.problem()


def test_an_option_sets_both_of_a_pair() -> None:
    (problem,) = problems(seqlen="512", head_dim="64", heads="8")
    assert (problem.seqlen_q, problem.seqlen_kv, problem.head_dim_qk, problem.head_dim_v) == (512, 512, 64, 64)
    assert (problem.heads_q, problem.heads_kv, problem.batch, problem.dtype, problem.mask) == (8, 8, 1, "bfloat16", "full")


def test_each_of_a_pair() -> None:
    (problem,) = problems(seqlen="512", seqlen_q="1", head_dim_qk="192", head_dim_v="128", heads="32", heads_kv="8")
    assert (problem.seqlen_q, problem.seqlen_kv, problem.head_dim_qk, problem.head_dim_v) == (1, 512, 192, 128)
    assert (problem.heads_q, problem.heads_kv) == (32, 8)


def test_everything_else() -> None:
    (problem,) = problems(seqlen="512", head_dim="64", heads="8", dtype="fp16", window="128,-1", layout="bshd", return_lse=True)
    assert (problem.dtype, problem.window, problem.layout, problem.return_lse) == ("float16", (128, None), "bshd", True)
    assert problems(seqlen="8", head_dim="64", heads="8", mask="causal_top_left", seqlen_kv="16")[0].mask == "causal_top_left"


def test_directions() -> None:
    """Both of each problem, in turn; only gradients can be asked to be deterministic."""
    shape = dict(seqlen="8,16", head_dim="64", heads="8")
    assert [(problem.seqlen_q, problem.direction) for problem in problems(**shape, direction="forward,backward")] == [
        (8, "forward"), (8, "backward"), (16, "forward"), (16, "backward"),
    ]  # fmt: skip
    assert {problem.direction for problem in problems(**shape)} == {"forward"}
    assert all(problem.deterministic for problem in problems(**shape, direction="backward", deterministic=True))
    assert all(problem.float16_dq for problem in problems(**shape, direction="backward", float16_dq=True))


@pytest.mark.parametrize("name", ["bf16", "bfloat16"])
def test_spellings_of_a_dtype(name: str) -> None:
    assert problems(seqlen="8", head_dim="64", heads="8", dtype=name)[0].dtype == "bfloat16"


def test_lists_give_every_combination() -> None:
    """The 36 problems of the README's table, from one line."""
    found = problems(seqlen="512,1024,2048,4096,8192,16384", head_dim="64,128,256", mask="full,causal", tokens="16384", hidden="2048")
    assert len(set(found)) == 36
    assert {problem.batch * problem.seqlen_q for problem in found} == {16384}
    assert {problem.heads_q * problem.head_dim_qk for problem in found} == {2048}


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"head_dim": "64", "heads": "8"}, "--seqlen is missing"),
        ({"seqlen": "8", "heads": "8", "head_dim_qk": "64"}, "--head-dim is missing"),
        ({"seqlen": "8", "head_dim": "64"}, "--heads is missing"),
        ({"seqlen": "8k", "head_dim": "64", "heads": "8"}, "--seqlen is '8k'"),
        ({"seqlen": "", "head_dim": "64", "heads": "8"}, "--seqlen is ''"),
        ({"seqlen": "8", "head_dim": "64", "heads": "8", "seqlen_kv": "1.5"}, "--seqlen-kv is '1.5'"),
        ({"seqlen": "-1", "head_dim": "64", "heads": "8"}, "seqlen_q is -1"),
        ({"seqlen": "8", "head_dim": "0", "heads": "8"}, "head_dim_qk is 0"),
        ({"seqlen": "8", "head_dim": "64", "heads": "3", "heads_kv": "2"}, "heads_q is 3"),  # N26
        ({"seqlen": "8", "head_dim": "64", "heads": "33", "heads_kv": "2"}, "heads_q is 33"),
        ({"seqlen": "8", "head_dim": "64", "heads": "8", "heads_kv": "0"}, "heads_kv is 0"),
        ({"seqlen": "8", "head_dim": "64", "heads": "8", "batch": "-1"}, "batch is -1"),
        ({"seqlen": "8", "head_dim": "64", "heads": "8", "dtype": "int8"}, "dtype is 'int8'"),
        ({"seqlen": "8", "head_dim": "64", "heads": "8", "mask": "causl"}, "mask is 'causl'"),
        ({"seqlen": "8", "head_dim": "64", "heads": "8", "mask": "full", "causal": True}, "--causal"),
        ({"seqlen": "8", "head_dim": "64", "heads": "8", "window": "4"}, "--window is '4'"),
        ({"seqlen": "8", "head_dim": "64", "heads": "8", "window": "4,x"}, "--window is 'x'"),
        ({"seqlen": "8", "head_dim": "64", "heads": "8", "window": "-2,0"}, "window (left) is -2"),
        ({"seqlen": "8", "head_dim": "64", "heads": "8", "layout": "sbhd"}, "layout is 'sbhd'"),
        ({"seqlen": "8", "head_dim": "64", "heads": "8", "direction": "back"}, "direction is 'back'"),
        ({"seqlen": "8", "head_dim": "64", "heads": "8", "deterministic": True}, "deterministic is True and direction is 'forward'"),
        ({"seqlen": "8", "head_dim": "64", "heads": "8", "hidden": "512"}, "--hidden stands instead of --heads"),
        ({"seqlen": "8", "head_dim": "96", "hidden": "512"}, "--hidden is 512"),
        ({"seqlen": "8", "head_dim": "64", "heads": "8", "tokens": "12"}, "--tokens is 12"),
        ({"seqlen": "0", "head_dim": "64", "heads": "8", "tokens": "12"}, "--tokens is 12"),
        ({"seqlen": "8", "head_dim": "64", "heads": "8", "tokens": "16", "batch": "2"}, "--tokens stands instead of --batch"),
    ],
)
def test_bad_options_are_named(options: dict[str, Any], named: str) -> None:
    """N26, O24: refused before anything is done, naming the option or the argument."""
    with pytest.raises(ArgumentError) as caught:
        problems(**options)
    assert named in str(caught.value)


def test_several_problems_where_one_is_wanted() -> None:
    assert "3 problems" in refused("explain", "--seqlen", "8,16,32", "--head-dim", "64", "--heads", "8", "--device", "h200")


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, True),
        ({"seqlen": "4096"}, True),
        ({"seqlen": "512,4096", "head_dim_v": "128", "causal": True, "dtype": "bf16", "batch": "4"}, True),
        ({"seqlen": "512"}, False),
        ({"mask": "full"}, False),
        ({"heads_kv": "8"}, False),
        ({"return_lse": True}, False),
        ({"deterministic": True}, False),
        ({"float16_dq": True}, False),
        ({"direction": "backward"}, False),
        ({"direction": "forward,backward"}, True),
        ({"window": "64,0"}, False),
    ],
)
def test_options_choose_among_stored_problems(options: dict[str, Any], expected: bool) -> None:
    assert ProblemOptions(**options).matches(rows.problem()) is expected


def test_choosing_refuses_what_it_does_not_know() -> None:
    for options in ({"mask": "causl"}, {"dtype": "int8"}, {"hidden": "2048"}, {"seqlen": "x"}, {"direction": "both"}):
        with pytest.raises(ArgumentError):
            ProblemOptions(**options).matches(rows.problem())


def test_device(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert DeviceOptions(device="h100").get().name == "NVIDIA H100 80GB HBM3"
    with pytest.raises(ArgumentError, match="h300"):
        DeviceOptions(device="h300").get_or_stand_in()
    with pytest.raises(UnsupportedError):
        DeviceOptions().get()
    assert DeviceOptions().get_or_stand_in() == rows.H200
    assert "taking h200" in capsys.readouterr().err


def test_database_that_is_named_must_exist_to_be_read(tmp_path: Path) -> None:
    from flashgen.errors import DatabaseError

    with pytest.raises(DatabaseError):
        DatabaseOptions(database=tmp_path / "typo.db").open_existing()
    assert not (tmp_path / "typo.db").exists()
    code, out, err = run("winners", "--database", str(tmp_path / "typo.db"), "--json")
    assert (code, out) == (1, "")
    assert "typo.db" in err


# ---- how commands are made -------------------------------------------------------------------------------------------


def made(function: Any) -> tuple[int, str, str]:
    small = typer.Typer(pretty_exceptions_enable=False)
    answers.command(small, example="x")(function)
    result = CliRunner().invoke(small, ["--json"], catch_exceptions=False)
    return result.exit_code, result.stdout, result.stderr


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ArgumentError("seqlen is -1"), 2),
        (UnsupportedError("no head dim of 512"), 2),
        (BuildError("ptxas said\nno"), 1),
        (PermissionError(13, "Permission denied", "x"), 1),
        (KeyboardInterrupt(), 130),
    ],
)
def test_errors_are_one_line_on_stderr(error: BaseException, code: int) -> None:
    def fails() -> answers.Answer:
        raise error

    got, out, err = made(fails)
    assert (got, out) == (code, "")
    assert len(err.splitlines()) == 1
    assert err.startswith("flashgen: ")


def test_bugs_are_not_hidden() -> None:
    def fails() -> answers.Answer:
        raise RuntimeError("a bug")

    with pytest.raises(RuntimeError, match="a bug"):
        made(fails)


def test_stdout_is_json_and_nothing_else() -> None:
    """Whatever libraries, compilers and child processes print meanwhile goes to stderr."""
    code = (
        "import os, subprocess, sys, typer\n"
        "from flashgen.cli import answer as answers\n"
        "app = typer.Typer()\n"
        "def noisy() -> answers.Answer:\n"
        "    print('python')\n"
        "    os.write(1, b'descriptor\\n')\n"
        "    subprocess.run([sys.executable, '-c', 'print(\"child\")'])\n"
        "    return answers.Answer(data={'a': 1}, show=lambda console: None)\n"
        "answers.command(app, example='x')(noisy)\n"
        "app(['--json'])"
    )
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {"a": 1}
    assert {"python", "descriptor", "child"} <= set(done.stderr.split())


# ---- the commands --------------------------------------------------------------------------------------------------


def test_model() -> None:
    """The figures of the paper's model."""
    data = answer("model", "--seqlen", "8192", "--head-dim", "128", "--heads", "32", "--device", "h100")
    assert list(data) == [
        "standard_elements",
        "flash_elements",
        "traffic_ratio",
        "standard_time_s",
        "flash_time_s",
        "time_ratio",
        "score_bytes",
    ]
    assert round(data["traffic_ratio"], 1) == 11.8
    assert (round(data["standard_time_s"] * 1e3, 1), round(data["flash_time_s"] * 1e3, 1), round(data["time_ratio"], 1)) == (5.2, 1.1, 4.7)
    assert round(data["score_bytes"] / 1e9, 1) == 4.3
    assert round(answer("model", "--seqlen", "8192", "--head-dim", "64")["traffic_ratio"], 1) == 39.7
    assert answer("model", "--seqlen", "8192", "--sram-kb", "114")["traffic_ratio"] < data["traffic_ratio"]
    assert round(answer("model", "--seqlen", "8192", "--direction", "backward")["traffic_ratio"], 1) == 10.4
    assert answer("model", "--seqlen", "8192", "--causal")["flash_time_s"] == data["flash_time_s"] / 2


def test_model_for_people() -> None:
    code, out, _ = run("model", "--seqlen", "8192", "--heads", "32")
    assert code == 0
    for words in ("11.8x", "5.21 ms", "1.11 ms", "4.68x", "4.29 GB", "standard", "flash", "sequence length N"):
        assert words in out


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--seqlen", "0"], "seqlen is 0"),
        (["--seqlen", "8", "--sram-kb", "nan"], "--sram-kb is nan"),
        (["--seqlen", "8", "--sram-kb", "0"], "--sram-kb is 0"),
        (["--seqlen", "8", "--device", "tpu"], "device is 'tpu'"),
        (["--seqlen", "8", "--direction", "back"], "direction is 'back'"),
        (["--seqlen", "x"], "--seqlen"),
        ([], "--seqlen"),
    ],
)
def test_model_refuses(arguments: list[str], named: str) -> None:
    assert named in refused("model", *arguments)


def test_winners(filled: Path) -> None:
    (row,) = answer("winners")
    assert Record.from_dict(row) == Database.open(filled).winner(rows.problem(), rows.H200)
    assert answer("winners", "--seqlen", "512") == []
    assert answer("winners", "--device", "h100") == []
    assert len(answer("winners", "--device", "h200", "--causal")) == 1
    code, out, _ = run("winners")
    assert code == 0
    assert "seqlen 4096" in out
    assert "TFLOP/s" in out


def test_winners_of_nothing() -> None:
    code, out, _ = run("winners", "--seqlen", "77")
    assert code == 0
    assert "No rows match" in out


def test_report(filled: Path, tmp_path: Path) -> None:
    page = tmp_path / "report" / "index.html"
    code, out, _ = run("report", "--batch", "4", "--out", str(page))
    assert code == 0
    assert "SDPA cudnn" in out
    assert page.read_text().startswith("<!DOCTYPE html>")
    assert [problem["predicted_only"] for problem in answer("report")["problems"]] == [True, False]


def test_report_to_a_place_that_cannot_be_written(filled: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    code, _, err = run("report", "--out", str(tmp_path / "file" / "index.html"))
    assert code == 1
    assert len(err.splitlines()) == 1


def test_explain() -> None:
    data = answer("explain", *PROBLEM, "--device", "h200")
    assert data["how"] in ("predicted", "default")
    code, out, _ = run("explain", *PROBLEM, "--device", "h200")
    assert code == 0
    assert "no winner was measured" in out


def test_explain_names_the_row(filled: Path) -> None:
    assert answer("explain", *PROBLEM, "--device", "h200")["row"]["problem"]["seqlen_q"] == 4096


def test_explain_refuses_what_has_no_kernel() -> None:
    assert "head_dim" in refused("explain", "--seqlen", "64", "--head-dim", "512", "--heads", "2", "--device", "h200")


def test_generate(tmp_path: Path) -> None:
    data = answer("generate", *PROBLEM, "--device", "h200", "--out", str(tmp_path / "kernel"), "--emit", "source,sass")
    assert len(data["files"]) == 2
    assert data["resources"]["registers"] > 64 and data["instructions"]["HGMMA"] > 0 and data["instructions"]["MUFU"] > 0
    assert all(Path(file).is_file() for file in data["files"])
    assert "--emit is 'exe'" in refused("generate", *PROBLEM, "--device", "h200", "--out", str(tmp_path), "--emit", "ptx,exe")
    assert "no kernel" in refused("generate", *PROBLEM, "--seqlen-kv", "0", "--device", "h200", "--out", str(tmp_path))


def test_generate_a_variant(tmp_path: Path) -> None:
    """What the first lines of a generated module say is how it is made again."""
    name = "forward_triton_full_pointer_masked_apart"
    (file,) = answer("generate", "--variant", name, "--out", str(tmp_path))["files"]
    assert f"flashgen generate --variant {name} --out" in Path(file).read_text()
    assert "names no variant" in refused("generate", "--variant", "forward_fast", "--out", str(tmp_path))
    assert "--out alone" in refused("generate", "--variant", name, *PROBLEM, "--out", str(tmp_path))


def test_doctor(filled: Path) -> None:
    data = answer("doctor")
    assert data["packages"]["torch"]["version"]
    assert data["database"]["path"] == str(filled)
    assert data["database"]["records"] == 36
    assert data["database"]["stale"] > 0  # made-up hashes
    assert data["next"]
    code, out, _ = run("doctor", "--clear-cache")
    assert code == 0
    for words in ("python", "triton", "database", "modules", "cleared", "→"):
        assert words in out


def test_doctor_says_what_is_not_supported(monkeypatch: pytest.MonkeyPatch) -> None:
    needs = ["torch>=2.0", "triton<3", 'numpy<1.0; extra == "interpreter"', 'pytest>=99; extra == "test"', "optuna>=99"]
    monkeypatch.setattr("importlib.metadata.requires", lambda name: needs)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    data = answer("doctor")
    assert {name: found["supported"] for name, found in data["packages"].items() if found["supported"] is not None} == {
        "torch": True,
        "triton": False,
        "numpy": False,
        "optuna": False,
    }
    advice = " ".join(data["next"])
    assert 'pip install "triton<3"' in advice
    assert 'pip install "optuna>=99"' in advice
    assert 'pip install "numpy<1.0"' in advice


def test_doctor_with_a_database_that_cannot_be_used(tmp_path: Path) -> None:
    data = answer("doctor", "--database", str(tmp_path))
    assert "error" in data["database"]
    assert any("--database" in line for line in data["next"])


def test_db_there_and_back(filled: Path, tmp_path: Path) -> None:
    lines, other = tmp_path / "rows.jsonl", tmp_path / "other.db"
    assert answer("db", "path") == {"path": str(filled)}
    assert answer("db", "export", str(lines))["rows"] == 36
    assert answer("db", "import", str(lines), "--database", str(other)) == {"added": 36, "known": 0, "broken": []}
    assert answer("db", "merge", str(filled), "--database", str(other)) == {"added": 0, "known": 36, "broken": []}
    assert len(answer("db", "export", "-", "--winners")) == 1
    code, out, _ = run("db", "export", "-", "--winners", "--compact")
    assert code == 0
    code, said, _ = run("db", "import", "-", "--database", str(tmp_path / "third.db"), input=out)
    assert code == 0
    assert "1 rows added" in said
    (winner,) = Database.open(tmp_path / "third.db").winners()
    assert winner.candidate == Database.open(filled).winners()[0].candidate


def test_db_prune(filled: Path) -> None:
    wrong = sum(record.measurement.status is Status.TIMEOUT for record in Database.open(filled).records())
    assert wrong > 0
    assert answer("db", "prune", "--status", "timeout", "--dry-run") == {"rows": wrong, "dry_run": True}
    assert answer("db", "prune", "--status", "timeout")["rows"] == wrong
    assert answer("db", "prune", "--status", "timeout")["rows"] == 0


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ([], "prune needs"),
        (["--status", "slow"], "--status is 'slow'"),
        (["--older-than", "nan"], "--older-than is nan"),
        (["--older-than", "-1"], "--older-than is -1"),
        (["--keep-best", "0"], "keep_best is 0"),
        (["--keep-best", "1.5"], "--keep-best"),
    ],
)
def test_db_prune_refuses(arguments: list[str], named: str) -> None:
    """O24: limits that cannot be meant are refused at once."""
    assert named in refused("db", "prune", *arguments)


def test_import_of_a_file_that_is_none_of_ours(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text('{"a": 1}\n')
    code, out, err = run("db", "import", str(file), "--json")
    assert (code, out) == (1, "")
    assert len(err.splitlines()) == 1
    assert run("db", "import", str(tmp_path / "missing"))[0] == 1


# ---- searching -----------------------------------------------------------------------------------------------------


def outcome(records: list[Record], measured: bool = True) -> Outcome:
    of = records[0].problem
    return Outcome(
        problem=of,
        device=rows.H200,
        winner=records[-1],
        default=records[0],
        records=tuple(records),
        peers=(rows.peer("cudnn", 150.0, of),),
        measured=measured,
        trials=len(records),
        skipped=1,
        seconds=3.0,
        reason="the budget of trials is used up",
        notes=("something to know",),
    )


class Search:
    """Stands in for flashgen.search.Session: reports two trials of each problem, keeps them, and may be interrupted."""

    def __init__(self, interrupt_at: int = 99, status: Status = Status.OK) -> None:
        self.calls: list[dict[str, Any]] = []
        self.interrupt_at = interrupt_at
        self.status = status

    def __call__(self, device: Device, database: Database) -> "Search":
        self.device, self.database = device, database
        return self

    def __enter__(self) -> "Search":
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def tune(self, of: Problem, *, on_event: Any, budget: Budget, **options: Any) -> Outcome:
        device, database = self.device, self.database
        self.calls.append({"problem": of, "budget": budget, "device": device, **options})
        measured = self.status is Status.OK
        us = [200.0, 120.0] if measured else [None, None]
        records = [
            rows.record(time_us, of=of, candidate=candidate, status=self.status, predicted_us=140.0)
            for time_us, candidate in zip(us, rows.candidates(2))
        ]
        on_event(Started(problem=of, device=device, legal=100, known=3, budget=budget))
        on_event(Staged(stage="searching", message="the default first"))
        for number, record in enumerate(records, start=1):
            database.add(record)
            on_event(
                Tried(
                    record=record,
                    source="model",
                    trials=number,
                    of_trials=budget.trials,
                    compiled=number,
                    best_us=us[number - 1],
                    best=record.candidate,
                    default_us=us[0],
                    elapsed_s=1.0 * number,
                    remaining_s=10.0,
                )
            )
            if len(self.calls) == self.interrupt_at:
                raise KeyboardInterrupt
        result = outcome(records, measured)
        on_event(Ended(outcome=result))
        return result


@pytest.fixture
def search(monkeypatch: pytest.MonkeyPatch) -> Search:
    stand_in = Search()
    monkeypatch.setattr("flashgen.search.Session", stand_in)
    return stand_in


def test_tune(search: Search, own_database: Path) -> None:
    code, out, err = run("tune", *PROBLEM, "--device", "h200", "--trials", "7", "--seconds", "9", "--seed", "5", "--force")
    assert code == 0
    assert "SDPA" not in out
    assert "winner" in out
    assert "something to know" in out
    assert "best" in err
    assert "default x 1.67" in err
    assert "predicted 140 µs" in err
    (call,) = search.calls
    assert (call["budget"].trials, call["budget"].seconds, call["seed"], call["force"]) == (7, 9.0, 5, True)
    assert call["problem"] == rows.problem()
    kept = Database.open(own_database).records(rows.problem())
    assert len([record for record in kept if record.provenance.origin == "local"]) == 2  # besides a winner that ships


def test_tune_gives_json(search: Search) -> None:
    (data,) = answer("tune", *PROBLEM, "--device", "h200")
    assert data["measured"] is True
    assert Record.from_dict(data["winner"]).measurement.median_us == 120.0
    assert data["speedup"] == pytest.approx(200 / 120)
    assert data["reason"] == "the budget of trials is used up"


def test_tune_several(search: Search) -> None:
    options = ("--seqlen", "512,1024", "--head-dim", "64,128", "--tokens", "16384", "--hidden", "2048", "--causal", "--device", "h200")
    assert len(answer("tune", *options)) == 4
    assert "[4/4] " in run("tune", *options)[2]
    assert len({call["problem"].key for call in search.calls}) == 4


def test_interrupted_tune_says_what_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C is no failure: results so far are printed, and the exit code is the shell's own for it."""
    monkeypatch.setattr("flashgen.search.Session", Search(interrupt_at=2))
    arguments = ("tune", "--seqlen", "512,1024,2048", "--head-dim", "128", "--heads", "16", "--device", "h200")
    code, out, err = run(*arguments)
    assert code == 130
    assert "the database keeps 3 rows of 3 problems" in err
    assert "seqlen 512" in out
    assert "seqlen 1024" in out
    code, out, _ = run(*arguments, "--json")
    assert len(json.loads(out)) >= 1


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--trials", "0"], "trials is 0"),
        (["--trials", "-1"], "trials is -1"),
        (["--trials", "1.5"], "--trials"),
        (["--seconds", "nan"], "seconds is nan"),
        (["--seconds", "0"], "seconds is 0"),
        (["--seconds", "inf"], "seconds is inf"),
        (["--heads-kv", "3"], "heads_q is 16"),
    ],
)
def test_tune_refuses(search: Search, own_database: Path, arguments: list[str], named: str) -> None:
    """O24, N26: limits and problems that cannot be meant are refused at once, before a database is made."""
    assert named in refused("tune", *PROBLEM, "--device", "h200", *arguments)
    assert not search.calls
    assert not own_database.exists()


def test_both_directions_are_tuned_explained_and_listed(monkeypatch: pytest.MonkeyPatch, own_database: Path, tmp_path: Path) -> None:
    """Each with winners of its own; the launcher of a backward kernel is not written, its module is."""
    monkeypatch.setattr("flashgen.search.Session", Search())
    both = [*PROBLEM, "--device", "h200", "--direction", "forward,backward"]
    outcomes = answer("tune", *both)
    assert [outcome["problem"].get("direction", "forward") for outcome in outcomes] == ["forward", "backward"]
    backward = [*PROBLEM, "--device", "h200", "--direction", "backward"]
    assert "backward, bfloat16" in run("explain", *backward)[1]
    explanation = answer("explain", *backward, "--deterministic")
    assert explanation["problem"]["deterministic"] and explanation["gradients"] is None
    assert explanation["candidate"]["variant"]["family"] == "backward" and explanation["bound_us"] > 0
    explanation = answer("explain", *backward, "--float16-dq")
    assert explanation["problem"]["float16_dq"]
    error = refused("generate", *backward, "--out", str(tmp_path / "kernel"))
    assert "launchers are written for forward kernels only; --variant backward_" in error
    name = error.split("--variant ")[1].split()[0]
    (file,) = answer("generate", "--variant", name, "--out", str(tmp_path / "kernel"))["files"]
    assert "dkdv" in Path(file).read_text()


def test_tune_without_a_gpu_names_the_way_out(monkeypatch: pytest.MonkeyPatch, search: Search) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert "name a device" in refused("tune", *PROBLEM)
    assert "bench measures on the GPU here" in refused("bench", *PROBLEM)
    assert "--peers is 'fa5'; it must be among fa4, flex" in refused("bench", *PROBLEM, "--peers", "fa4,fa5")


def test_demo_without_a_gpu_says_first_that_nothing_was_measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("flashgen.search.Session", Search(status=Status.PREDICTED))
    page = tmp_path / "report" / "index.html"
    code, out, _ = run("demo", "--out", str(page))
    assert code == 0
    assert out.startswith("Nothing was measured, and bf16 was not checked")
    body = page.read_text().split("<body>")[1].lstrip()
    assert body.startswith('<p class="warning" role="alert">Nothing was measured, and bf16 was not checked')
    data = answer("demo", "--out", str(page))
    assert (data["measured"], data["attention"], data["report"]) == (False, None, str(page))


def test_progress_on_a_terminal() -> None:
    """One line, kept up to date, that is gone in the end."""
    console = Console(file=io.StringIO(), force_terminal=True, width=200, color_system=None)
    with Live(console) as live:
        Search()(rows.H200, Database.memory()).tune(rows.problem(), on_event=live.listen, budget=Budget(trials=2))
        live._progress.refresh()
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "100 candidates, 3 known" in text
    assert "2 trials, 1 skipped, 3 s: the budget of trials is used up" in text


def test_progress_of_failures() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=200, color_system=None)
    with Live(console) as live:
        Search(status=Status.TIMEOUT)(rows.H200, Database.memory()).tune(rows.problem(), on_event=live.listen, budget=Budget(trials=2))


BENCH = """
import json
from flashgen import canonical, space
from flashgen.bench import Bench
from flashgen.cli import bench, demo
from flashgen.device import Device
from flashgen.problem import Problem

class Gpu:
    now = 0.0
    def measure(self, calls):
        self.now += 0.01 * len(calls)
        return [100.0 + 10 * place for place, _ in enumerate(calls)]
    def burst(self, seconds):
        self.now += seconds
        return 1.0
    def clock(self):
        return self.now

sizes = dict(batch=1, heads_q=2, heads_kv=1, seqlen_q=32, seqlen_kv=32, head_dim_qk=16, head_dim_v=16)
device = Device.named("h200")
answers = {}
for direction in ("forward", "backward"):
    problem = Problem(direction=direction, dtype="float16", mask="causal", **sizes)
    default = space.portable_default(problem, device)
    portable = [each for each in space.candidates(problem, device) if each.variant.backend == "triton" and each != default]
    rows = bench.compare(problem, device, [portable[0], default], Bench(gpu=Gpu()), 0.1)
    answers[direction] = {"rows": [canonical.to_dict(row) for row in rows], "call": demo.call(problem, "cpu")}
print(json.dumps(answers))
"""


def test_bench_and_demo_measure_and_check() -> None:
    """On a stand-in for the GPU, with kernels in Triton's interpreter: rows of candidates and peers; attention against the oracle."""
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, "-c", BENCH], check=False, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    for direction, data in json.loads(done.stdout.splitlines()[-1]).items():
        assert data["call"]["ok"], data["call"]
        assert data["call"]["how"] in ("predicted", "default")
        records = [Record.from_dict(row) for row in data["rows"]]
        assert [record.measurement.status for record in records] == [Status.OK] * len(records)
        assert {record.peer.name for record in records if record.peer} >= {"math"}
        candidates = [record for record in records if record.candidate]
        assert len(candidates) == 2
        for record in candidates:
            assert record.candidate is not None and record.candidate.variant.family == direction
            assert record.estimate is not None
            assert record.source_sha256
            assert record.measurement.error is not None
            assert record.measurement.tolerance is not None
            assert record.measurement.error <= record.measurement.tolerance
