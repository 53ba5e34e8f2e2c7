"""Generated modules: what a reader, a linter and the next commit may expect of them."""

import ast
import itertools
import subprocess
import sys
from pathlib import Path

import jinja2
import pytest

from flashgen.candidate import CHOICES, Variant
from flashgen.errors import ArgumentError
from flashgen.render import environment, render, templates_dir, tidy

GOLDEN = Path(__file__).resolve().parent.parent / "golden"
FLAGS = ("masked_apart", "longest_first", "padded", "scale_first", "store_lse")
PORTABLE = [
    Variant(mask=mask, load=load, **dict(zip(FLAGS, flags, strict=True)))
    for mask, load in itertools.product(CHOICES["mask"], CHOICES["load"])
    for flags in itertools.product((False, True), repeat=len(FLAGS))
]
SPECIALISED = [
    Variant(
        backend="hopper", load="tma", mask=mask, order=order, lazy_rescale=True, **dict(zip(("ping_pong", *FLAGS[1:]), flags, strict=True))
    )
    for mask, order in itertools.product(CHOICES["mask"], ("qk_first", "pv_first"))
    for flags in itertools.product((False, True), repeat=len(FLAGS))
]
BACKWARD_FLAGS = ("masked_apart", "padded", "store_lse")
BACKWARD = [
    Variant(family="backward", mask=mask, **dict(zip(BACKWARD_FLAGS, flags, strict=True)))
    for mask in CHOICES["mask"]
    for flags in itertools.product((False, True), repeat=len(BACKWARD_FLAGS))
]
SPECIALISED_BACKWARD = [
    Variant(family="backward", backend="hopper", load="tma", mask=mask, padded=padded, store_lse=store_lse, **structure)
    for mask in CHOICES["mask"]
    for padded, store_lse in itertools.product((False, True), repeat=2)
    for structure in (dict(), dict(fused=True), dict(fused=True, float16_dq=True), dict(split_roles=True))
]
VARIANTS = PORTABLE + SPECIALISED + BACKWARD + SPECIALISED_BACKWARD


def kernel_templates() -> list[Path]:
    return [path for path in sorted(templates_dir().rglob("*.py.jinja")) if path.parent.name in ("lib", *CHOICES["backend"])]


@pytest.mark.parametrize("path", kernel_templates(), ids=lambda path: f"{path.parent.name}/{path.name}")
def test_raw_template_is_python(path: Path) -> None:
    """Control flow is a comment, so editors, linters and readers can take a template for what it is."""
    ast.parse(path.read_text())


def test_every_variant_is_clean(tmp_path: Path) -> None:
    """All modules pass the linter and the formatter as written, and no two are the same."""
    texts = {variant: render(variant).text for variant in VARIANTS}
    assert len(set(texts.values())) == len(VARIANTS)
    for variant, text in texts.items():
        (tmp_path / f"{variant.name}.py").write_text(text)
    config = Path(__file__).resolve().parents[2] / "pyproject.toml"
    for command in (["check"], ["format", "--check"]):
        done = subprocess.run(
            [sys.executable, "-m", "ruff", *command, "--config", config, "--quiet", tmp_path], capture_output=True, text=True
        )
        assert done.returncode == 0, done.stdout + done.stderr


def test_golden(pytestconfig: pytest.Config) -> None:
    """Modules of each family, read in review like source. After a change that is meant: pytest tests/cpu/test_render.py --update-golden."""
    hopper = dict(backend="hopper", load="tma", order="qk_first")
    variants = [
        Variant(),
        Variant(mask="window", load="tma", longest_first=True, store_lse=True),
        Variant(**hopper, lazy_rescale=True),
        Variant(**hopper, mask="causal", ping_pong=True, lazy_rescale=True, longest_first=True, store_lse=True),
        Variant(family="backward", mask="causal"),
        Variant(family="backward", backend="hopper", load="tma", mask="causal", fused=True),
        Variant(family="backward", backend="hopper", load="tma", mask="causal", fused=True, float16_dq=True, store_lse=True),
        Variant(family="backward", backend="hopper", load="tma", store_lse=True, split_roles=True),
    ]
    if pytestconfig.getoption("--update-golden"):
        for variant in variants:
            (GOLDEN / f"{variant.name}.py").write_text(render(variant).text)
    assert {path.name for path in GOLDEN.glob("*.py")} == {f"{variant.name}.py" for variant in variants}
    for variant in variants:
        assert render(variant).text == (GOLDEN / f"{variant.name}.py").read_text()


@pytest.mark.parametrize("variant", [Variant(mask="causal", store_lse=True), SPECIALISED[-1]], ids=lambda variant: variant.name)
def test_header_says_how_to_make_it_again(variant: Variant) -> None:
    lines = [line.removeprefix("#").strip() for line in render(variant).text.splitlines() if line.startswith("#")]
    commands = " ".join(lines).replace("\\ ", "")
    assert f"--variant {variant.name} " in commands.partition("Again:   flashgen generate ")[2].partition("q (batch")[0]
    assert Variant.named(variant.name) == variant


@pytest.mark.parametrize("variant", VARIANTS[::13], ids=lambda variant: variant.name)
def test_name_and_variant_are_one(variant: Variant) -> None:
    assert Variant.named(variant.name) == variant


def test_a_module_has_the_functions_it_says() -> None:
    """A launch looks them up by these names, in this order."""
    for variant in VARIANTS[:: len(PORTABLE) - 1] + BACKWARD + SPECIALISED_BACKWARD:
        source = render(variant)
        functions = [node.name for node in ast.parse(source.text).body if isinstance(node, ast.FunctionDef)]
        assert [name for name in functions if name.startswith("attention_")] == list(source.entries)
        assert all(name.startswith(f"attention_{variant.family}") for name in source.entries)


@pytest.mark.parametrize("name", ["", "forward", "forward_triton_full", "forward_triton_full_pointer_fast", "forward_triton_none_pointer"])
def test_unknown_names_are_refused(name: str) -> None:
    with pytest.raises(ArgumentError, match="names no variant"):
        Variant.named(name)


def test_unknown_variable_is_an_error() -> None:
    with pytest.raises(jinja2.UndefinedError):
        environment().from_string("{{ variant.no_such_field }}").render(variant=Variant())


def test_hash_ignores_comments_and_layout_and_nothing_else() -> None:
    source = render(Variant())
    again = type(source)(variant=source.variant, text="# A remark.\n\n" + source.text.replace('"""out', '"""Out'), entries=source.entries)
    other = type(source)(variant=source.variant, text=source.text.replace("* LOG2_E", "* LN_2"), entries=source.entries)
    assert source.sha256 == again.sha256
    assert source.sha256 != other.sha256
    assert source.sha256 != render(Variant(mask="causal")).sha256


def test_text_has_no_date_hash_or_version() -> None:
    """The same variant gives the same bytes on any day and release."""
    import flashgen

    for variant in VARIANTS[::29]:
        text = render(variant).text
        assert flashgen.__version__ not in text
        assert "20" not in [word[:2] for word in text.split() if len(word) == 10 and word[4:5] == "-"]
        assert render(variant).sha256 not in text


def test_tidy_keeps_blank_lines_as_the_formatter_wants_them() -> None:
    assert tidy("import a\n# b\n\n\n\n    c  \n\n@triton.jit\nd\n\n\n\n") == "import a\n\n# b\n\n    c\n\n\n@triton.jit\nd\n"
