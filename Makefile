# `make demo` runs the main job, `make test` every check. Both set up $(VENV) first, once: a stamp in it says that the
# set-up is as new as the files it was made from. A fresh machine needs Python 3.11+ and make;
# with a C++ compiler the emulator and attention on CPU run in the native library, and with Chromium
# (apt-get install chromium) the tests look at the pages in it.

PYTHON  ?= python3
VENV    ?= .venv
OUT     ?= halfulp-demo
WORKERS ?= 2

BIN     := $(VENV)/bin
# Every install goes through the constraints, and builds use the pinned back end in $(VENV) rather than an isolated
# environment, which would not see them.
INSTALL := $(BIN)/python -m pip install -qq --disable-pip-version-check --no-input -c constraints.txt
# As pip does with all that it installs, except what is editable: every process would compile the package anew where
# PYTHONDONTWRITEBYTECODE is set.
COMPILE := $(BIN)/python -m compileall -q src
SOURCES := pyproject.toml constraints.txt Makefile src/halfulp/__init__.py \
           native/CMakeLists.txt $(wildcard native/*.h native/*.hpp native/*.cpp)

LOWEST  := tests/formats tests/test_attention.py tests/attention/test_sdpa_semantics.py \
           tests/attention/test_transformers.py tests/watch/test_foreign.py tests/watch/test_watcher.py \
           tests/audit/test_statistics.py tests/algorithms/test_golden.py tests/test_chances.py \
           tests/ops/test_operators.py tests/ops/test_direct.py tests/attention/test_patch.py

.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help demo test thorough lowest documents lint format hooks clean

help:
	@echo 'make demo    run the main job on this machine and write $(OUT)/report.html'
	@echo 'make test    lint, types and tests'
	@echo 'make thorough  every case of the tests, the long ones too'
	@echo 'make lowest  the core tests on the oldest versions that are allowed'
	@echo 'make lint    lint and types alone'
	@echo 'make format  rewrite the tree in the format that lint expects'
	@echo 'make sanitize  random calls of the native library built with each sanitizer (Linux, GCC)'
	@echo 'make hooks   run the quick checks at every git commit'
	@echo 'make clean   remove the virtual environment and what tools left behind'
	@echo 'Variables: PYTHON=$(PYTHON) VENV=$(VENV) OUT=$(OUT) WORKERS=$(WORKERS)'

demo: $(VENV)/.stamp-run
	@$(BIN)/halfulp demo --out $(OUT)

# pytest comes last, so that its closing line ends the output.
test: lint
	@$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal

# What `test` runs some cases of alone: whole searches for causes, and every kernel of the zoos.
thorough: $(VENV)/.stamp-dev
	@$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal --thorough

# The core on the oldest versions that pyproject.toml allows, in an environment of its own.
lowest: $(VENV)/.stamp-dev
	@$(BIN)/uv venv -q --clear --python $(BIN)/python $(VENV)-lowest
	@$(BIN)/uv pip install -q --python $(VENV)-lowest --resolution lowest-direct '.[lab,targets]'
	@$(BIN)/uv pip freeze -q --python $(VENV)-lowest | grep -v '^halfulp' > $(VENV)-lowest/lowest.txt
	@$(BIN)/uv pip install -q --python $(VENV)-lowest -c $(VENV)-lowest/lowest.txt \
	  pytest hypothesis ml_dtypes gfloat mpmath expecttest
	@$(VENV)-lowest/bin/python -m pytest -p no:cacheprovider $(LOWEST)

# The documents alone: links, programs in them, and what they say of the package.
documents: $(VENV)/.stamp-dev
	@$(BIN)/python -m pytest tests/test_documents.py tests/test_architecture.py

lint: $(VENV)/.stamp-dev
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy

format: $(VENV)/.stamp-dev
	@$(BIN)/ruff check --fix --exit-zero --quiet .
	@$(BIN)/ruff format .

hooks: $(VENV)/.stamp-dev
	@$(BIN)/pre-commit install

# A copy of the package beside each build: nothing else may load a library that wants its sanitizer first.
CALLS ?= 200
sanitize: $(VENV)/.stamp-dev
	@for kind in address undefined thread; do \
	  at=build/sanitize/$$kind && mkdir -p $$at && rm -rf $$at/halfulp && cp -r src/halfulp $$at/halfulp && \
	  PATH=$(abspath $(BIN)):$$PATH cmake -S native -B $$at/build -G Ninja -DHALFULP_SANITIZE=$$kind > /dev/null && \
	  PATH=$(abspath $(BIN)):$$PATH cmake --build $$at/build > /dev/null && \
	  cp $$at/build/libhalfulp.so $$at/halfulp/ && echo "$$kind:" && \
	  case $$kind in address) lib=asan;; undefined) lib=ubsan;; thread) lib=tsan;; esac && \
	  PYTHONPATH=$$at OMP_NUM_THREADS=1 LD_PRELOAD=$$($${CXX:-g++} -print-file-name=lib$$lib.so) \
	  ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1 \
	  TSAN_OPTIONS=ignore_noninstrumented_modules=1:halt_on_error=1 \
	  setarch -R $(abspath $(BIN))/python benchmarks/fuzz_native.py --largest 60 --calls $(CALLS) || exit 1; \
	done

clean:
	rm -rf $(VENV) $(VENV)-lowest .mypy_cache .pytest_cache .ruff_cache .hypothesis build dist

FOUND = $(shell $(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null)
RECENT = $(shell $(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo yes)
PIP = $(shell $(PYTHON) -c 'import ensurepip, venv' 2>/dev/null && echo yes)

$(VENV)/pyvenv.cfg:
	$(if $(RECENT),,$(error halfulp needs Python 3.11 or newer, but PYTHON=$(PYTHON) is $(or $(FOUND),not there); try: make PYTHON=python3.12 $(MAKECMDGOALS)))
	$(if $(PIP),,$(error PYTHON=$(PYTHON) lacks its venv or ensurepip module; on Debian and Ubuntu: apt-get install python3-venv))
	@$(PYTHON) -m venv $(VENV) || { rm -f $@; exit 1; }

$(VENV)/.stamp-backend: $(VENV)/pyvenv.cfg constraints.txt
	@echo 'Setting up $(VENV) (a minute or two, once) ...'
	@$(INSTALL) scikit-build-core cmake ninja setuptools
	@touch $@

$(VENV)/.stamp-run: $(VENV)/.stamp-backend $(SOURCES)
	@$(INSTALL) --no-build-isolation -e '.[lab]'
	@$(COMPILE)
	@touch $@

$(VENV)/.stamp-dev: $(VENV)/.stamp-backend $(SOURCES)
	@$(INSTALL) --no-build-isolation -e '.[dev,targets]'
	@$(COMPILE)
	@touch $@ $(VENV)/.stamp-run
