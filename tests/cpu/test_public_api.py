"""import flashgen: what it offers, and what it leaves alone."""

import copy
import pickle
import subprocess
import sys

import pytest

import flashgen


def run(code: str) -> str:
    """What a new Python prints."""
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_import_is_light() -> None:
    """I16: neither heavy packages nor CUDA, and no file but flashgen's own code is opened."""
    print(
        run(
            """
import sys
opened = []
sys.addaudithook(lambda event, values: opened.append(str(values[0])) if event == "open" else None)
import flashgen
heavy = {"torch", "triton", "optuna", "sqlalchemy", "alembic", "jinja2", "plotly", "typer", "rich", "numpy"} & set(sys.modules)
assert not heavy, heavy
strange = [name for name in opened if not name.endswith((".py", ".pyc")) and "__pycache__" not in name]
assert not strange, strange
assert flashgen.__version__
"""
        )
    )


def test_dispatch_loads_no_tuner_and_no_cuda() -> None:
    """I16: the path of a call imports neither Optuna, the database's SQLAlchemy, plotting nor dynamo, and initialises no CUDA."""
    run(
        """
import sys
from flashgen import attention, explain
import torch
heavy = {"optuna", "sqlalchemy", "alembic", "plotly", "typer", "rich", "torch._dynamo", "triton"} & set(sys.modules)
assert not heavy, heavy
assert not torch.cuda.is_initialized()
"""
    )


@pytest.mark.parametrize("name", flashgen.__all__)
def test_every_public_name_exists(name: str) -> None:
    assert getattr(flashgen, name) is not None
    assert name in dir(flashgen)


def test_no_public_function_has_the_name_of_a_module() -> None:
    """`flashgen.tune` must stay a function however modules are imported."""
    modules = {name for name in flashgen._MODULE_OF.values()}
    assert not modules & set(flashgen.__all__)
    assert set(flashgen._MODULE_OF) | {"__version__"} == set(flashgen.__all__)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="attention_"):
        flashgen.attention_  # noqa: B018


def test_errors_are_one_family() -> None:
    for name in flashgen.__all__:
        if name.endswith("Error"):
            assert issubclass(getattr(flashgen, name), flashgen.FlashgenError)
    assert issubclass(flashgen.ArgumentError, ValueError)
    assert issubclass(flashgen.ArgumentTypeError, TypeError)
    assert issubclass(flashgen.UnsupportedError, NotImplementedError)


def test_attention_is_pickled_by_name_and_copied() -> None:
    """I18: what holds `flashgen.attention` can be pickled and deep-copied, with no kernel inside."""
    assert pickle.loads(pickle.dumps(flashgen.attention)) is flashgen.attention
    assert copy.deepcopy({"attention": flashgen.attention})["attention"] is flashgen.attention
    problem = flashgen.Problem(batch=1, heads_q=2, heads_kv=1, seqlen_q=3, seqlen_kv=4, head_dim_qk=8, head_dim_v=8)
    assert pickle.loads(pickle.dumps(problem)) == problem
