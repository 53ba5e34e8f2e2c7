"""Variant -> Source: the text of a kernel module. The only module that knows Jinja."""

import ast
import functools
import hashlib
import re
from dataclasses import dataclass
from pathlib import Path

import jinja2

from flashgen.candidate import Variant
from flashgen.errors import ArgumentError

_PACKAGE = Path(__file__).resolve().parent


@dataclass(frozen=True, kw_only=True)
class Source:
    """A rendered module. entries names its kernel functions, in the order in which they are launched."""

    variant: Variant
    text: str
    entries: tuple[str, ...]

    @functools.cached_property
    def sha256(self) -> str:
        """Hash of the code alone, without comments, docstrings and layout: what a stored winner was measured with."""
        tree = ast.parse(self.text)
        for node in ast.walk(tree):
            if isinstance(node, (ast.FunctionDef, ast.Module)) and ast.get_docstring(node) is not None:
                node.body = node.body[1:] or [ast.Pass()]
        return hashlib.sha256(ast.unparse(tree).encode()).hexdigest()


def shipped_dir(name: str) -> Path:
    """The folder templates or tuning_db: inside an installed wheel, or beside the package in a checkout.

    Raises FileNotFoundError where neither exists.
    """
    for folder in (_PACKAGE / f"_{name}", _PACKAGE.parent / name):
        if folder.is_dir():
            return folder
    places = f"neither {_PACKAGE / f'_{name}'} nor {_PACKAGE.parent / name}"
    raise FileNotFoundError(f"flashgen was installed without its {name}: {places} exists")


def templates_dir() -> Path:
    """The folder of the templates."""
    return shipped_dir("templates")


@functools.cache
def environment() -> jinja2.Environment:
    """The environment of every template that renders Python. Control flow in it is a Python comment, so that a raw template is
    itself valid Python, and an unknown name is an error."""
    return jinja2.Environment(
        loader=jinja2.FileSystemLoader(templates_dir()),
        undefined=jinja2.StrictUndefined,
        line_statement_prefix="#%",
        line_comment_prefix="##",
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )


@functools.cache
def render(variant: Variant) -> Source:
    """The module of a variant: the same variant gives the same bytes. Raises ArgumentError where the backend has no such family."""
    name = f"{variant.backend}/{variant.family}.py.jinja"
    try:
        template = environment().get_template(name)
    except jinja2.TemplateNotFound as error:
        raise ArgumentError(f"variant is {variant.name!r}, for which there is no template: templates/{name}") from error
    entries = ["attention_forward"]
    if variant.family == "backward":
        entries = ["attention_backward_delta", "attention_backward_dkdv", "attention_backward_dq" + "_convert" * variant.fused]
        if variant.float16_dq:
            entries.insert(0, "attention_backward_bounds")
    return Source(variant=variant, text=tidy(template.render(variant=variant)), entries=tuple(entries))


def tidy(text: str) -> str:
    """Blank lines as PEP 8 wants them: Jinja's line statements swallow some and leave others."""
    text = re.sub(r"[ \t]+\n", "\n", text)
    text = re.sub(r"\n{2,}(?=[ \t])", "\n\n", text)
    text = re.sub(r"\n+(?=@(?:triton|gluon|builtin)\b|# ---- )", "\n\n\n", text)
    text = re.sub(r"(?m)^((?:import|from) .*\n)(?=#)", r"\1\n", text)
    return text.strip("\n") + "\n"
