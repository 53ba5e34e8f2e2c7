# `make demo` tunes an attention kernel and shows it; `make test` checks and tests everything. Both make .venv first:
#
#   make demo PYTHON=python3.12 TORCH="torch==2.13.0" TRITON="triton==3.6.0"
#
# A torch that PYTHON already has is seen from .venv, and kept where it satisfies TORCH. Without a package index, a folder of
# wheels is enough: make demo PIP_NO_INDEX=1 PIP_FIND_LINKS=/path/to/wheels

PYTHON ?= python3
TORCH ?= torch>=2.10
TRITON ?= triton>=3.6,<3.10

python := .venv/bin/python
pip := $(python) -m pip --disable-pip-version-check

.PHONY: demo test check format clean
.DELETE_ON_ERROR:

demo: .venv/demo
	.venv/bin/flashgen demo

# Two files at a time take little more than half the time; more would crowd a GPU.
test: check
	$(python) -m pytest --numprocesses=2 --dist=loadfile

check: .venv/test
	$(python) -m ruff check .
	$(python) -m ruff format --check .
	$(python) -m mypy
	.venv/bin/lint-imports --no-logo

format: .venv/test
	$(python) -m ruff check --fix .
	$(python) -m ruff format .

clean:
	rm -rf .venv .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis build dist report

# A venv made from another venv does not see that one's packages, not even with --system-site-packages: hence the .pth file.
# Without ensurepip (Debian's python3-venv), pip is then found there too.
.venv/pyvenv.cfg:
	$(PYTHON) -m venv --clear .venv || $(PYTHON) -m venv --clear --without-pip .venv
	$(PYTHON) -c 'import importlib.util, sys; importlib.util.find_spec("torch") and print(*(path for path in sys.path if path.endswith("-packages")), sep="\n")' \
	    > "$$($(python) -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/parent.pth"

# Without a GPU, Triton's interpreter checks the kernels, and it has needs of its own.
.venv/demo: .venv/pyvenv.cfg pyproject.toml
	$(pip) install '$(TORCH)' '$(TRITON)'
	$(pip) install --editable ".$$($(python) -W ignore -c 'import torch; print("" if torch.cuda.is_available() else "[interpreter]")')"
	touch $@

.venv/test: .venv/pyvenv.cfg pyproject.toml
	$(pip) install '$(TORCH)' '$(TRITON)' --editable '.[test]'
	touch $@
