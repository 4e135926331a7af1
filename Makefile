# Targets make what they need from nothing: a virtual environment in .venv, torch, then Twofold with its extras.
#
#   PYTHON  the interpreter that the environment is made from
#   TORCH   the torch to install, or `system` for the one that PYTHON already has (the default where that one sees a
#           GPU). The pinned version comes as a small CPU build from an index or wheel folder that has one.
#   MODEL   what `make demo` serves; QUANTIZE how, PORT where

PYTHON   ?= python3
TORCH    ?= auto
VENV     ?= .venv
MODEL    ?= smollm2-135m-instruct
QUANTIZE ?= rtn:4:32
PORT     ?= 8000

PINNED_TORCH := torch==2.13.0
BIN          := $(abspath $(VENV))/bin
PIP          := $(BIN)/python -m pip --disable-pip-version-check
RUN_STAMP    := $(VENV)/.installed
DEV_STAMP    := $(VENV)/.installed-dev
INTEROP      := $(abspath $(VENV))/interop

.PHONY: help demo install test test-slow arm64 bench-cpu interop lint format check-kernels kernel-tables wheel clean

help:
	@echo "make demo       serve a small 4-bit model on http://127.0.0.1:$(PORT)"
	@echo "make test       run the tests"
	@echo "make test-slow  run every test that needs no GPU, the long ones too"
	@echo "make arm64      the CPU kernels compiled for 64-bit ARM and run under qemu, where Debian's packages for that are there"
	@echo "make bench-cpu  Twofold beside the other engines that are installed (BENCH takes options, --help lists them)"
	@echo "make interop    read quantized results with the tools that own their formats"
	@echo "make lint       ruff and mypy"
	@echo "make check-kernels  compile the Triton kernels for ten GPU architectures and check each"
	@echo "make kernel-tables  the same, and write the tables of docs/kernels.md"
	@echo "make format     let ruff lay out the code"
	@echo "make wheel      build the wheel into dist/"
	@echo "make install    only make the environment in $(VENV)"
	@echo "make clean      remove the environment and everything that was built"

demo: $(RUN_STAMP)
	$(BIN)/twofold serve $(MODEL) --quantize $(QUANTIZE) --host 127.0.0.1 --port $(PORT)

install: $(DEV_STAMP)

# pytest by its own command: `python -m pytest` would put this folder, and so our `kernels`, first on the path.
test: $(DEV_STAMP)
	$(BIN)/pytest

test-slow: $(DEV_STAMP)
	$(BIN)/pytest -m "not gpu"

# Needs a cross compiler and an emulator: gcc-aarch64-linux-gnu libc6-dev-arm64-cross qemu-user.
arm64: $(DEV_STAMP)
	$(BIN)/pytest -m arm64 tests/kernels/cpu

# LLAMA_SERVER, OPENVINO_PYTHON and so on say where peers are; BENCH takes options and a model.
bench-cpu: $(DEV_STAMP)
	$(BIN)/python benchmarks/cpu_peers.py $(BENCH)

# Do the tools that own the formats read what we write? They lie in a folder of their own, away from the environment.
interop: $(DEV_STAMP)
	$(PIP) install --no-deps --no-build-isolation --upgrade --target $(INTEROP) -r tests/interop-tools.txt
	PYTHONPATH=$(INTEROP) $(BIN)/pytest tests/quant/test_interop.py

# mypy names modules after their folder; the link gives this folder the package's name wherever it lies.
lint: $(DEV_STAMP)
	$(BIN)/ruff check .
	mkdir -p $(VENV)/lint && ln -sfn "$(CURDIR)" $(VENV)/lint/twofold
	cd $(VENV)/lint && $(BIN)/mypy --config-file twofold/pyproject.toml --cache-dir "$(CURDIR)/.mypy_cache" \
	    -p twofold.cli -p twofold.engine -p twofold.kernels -p twofold.platforms -p twofold.quant -p twofold.server

# CHECK takes options, such as --subset.
check-kernels: $(DEV_STAMP)
	cd $(VENV) && $(BIN)/python -m twofold.kernels.triton.check $(CHECK)

kernel-tables: $(DEV_STAMP)
	cd $(VENV) && $(BIN)/python -m twofold.kernels.triton.check --markdown "$(CURDIR)/docs/kernels.md" $(CHECK)

format: $(DEV_STAMP)
	$(BIN)/ruff format .

wheel: $(RUN_STAMP)
	rm -rf build dist
	$(PIP) wheel --no-deps --wheel-dir dist .
	rm -rf build

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(RUN_STAMP): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit("Python 3.10 or newer is needed; set PYTHON" if sys.version_info < (3, 10) else 0)'
	@set -e; torch='$(TORCH)'; \
	if [ "$$torch" = auto ]; then \
	    torch=$$($(PYTHON) -c 'import torch; print("system" if torch.cuda.is_available() else "$(PINNED_TORCH)")' \
	        2>/dev/null || echo '$(PINNED_TORCH)'); \
	fi; \
	if [ "$$torch" = system ]; then \
	    $(PYTHON) -c 'import torch' 2>/dev/null || \
	        { echo "$(PYTHON) has no torch: install one there, set PYTHON, or leave TORCH out" >&2; exit 1; }; \
	    echo "using the torch of $(PYTHON)"; \
	    $(PYTHON) -m venv --system-site-packages $(VENV); \
	else \
	    $(PYTHON) -m venv $(VENV); \
	    $(PIP) install "$$torch"; \
	fi
	$(PIP) install --editable .
	@touch $@

# GPU builds of torch bring their own triton; elsewhere it is there to run the GPU kernels in its interpreter.
$(DEV_STAMP): $(RUN_STAMP)
	extras=$$($(BIN)/python -c 'import triton' 2>/dev/null && echo dev || echo dev,triton); \
	$(PIP) install --editable ".[$$extras]"
	@touch $@
