# Offcore's tasks. Needs python3 (3.10 or newer, with venv and headers), make and g++; everything
# else comes from PyPI into .venv. PY and CXX choose another Python or compiler.
PY ?= python3
CXX ?= g++
BIN := .venv/bin
SOURCES := $(shell find core shim studies python machines -not -name '*.so' -not -name __pycache__ -not -name '*.pyc')
# Many tests wait for processes of theirs: four at once keep two cores busy.
WORKERS ?= 4
PYTEST := $(BIN)/python -m pytest -n $(WORKERS)
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# Tests are compiled once, not by every worker of the three runs.
export PYTHONDONTWRITEBYTECODE :=
export PATH := $(CURDIR)/$(BIN):$(PATH)
export CXX

.PHONY: help build demo test test-long sanitize fakes lint format docs asan tsan clean
help:  ## list these targets
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 12

build: .venv/.installed  ## create .venv, build the package and install it there

demo: build  ## real collectives, checked and compared: simulated 8 x MI300X, then this host
	$(BIN)/offcore demo

test: lint fakes  ## lint and all tests
	$(PYTEST)

sanitize: asan tsan  ## the tests' short forms under asan, ubsan and tsan

test-long: lint fakes  ## everything long: hours of fuzzing, and all tests under the sanitizers
	$(PYTEST) --long
	$(MAKE) sanitize SANITIZED="--long --hypothesis-profile=ci"

# A test that needs the stand-in drivers builds them, in the time that it has itself.
fakes: build .venv/.checks
	$(BIN)/python tests/fakes/cuda_library.py

lint: build .venv/.checks  ## clang-format, ruff and mypy
	find core shim studies python/bindings tests/conformance/toy -name '*.h' -o -name '*.cpp' | xargs $(BIN)/clang-format --dry-run -Werror
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	MYPYPATH=python $(BIN)/mypy benchmarks/*.py examples/*.py

format:  ## rewrite the sources as lint wants them
	find core shim studies python/bindings tests/conformance/toy -name '*.h' -o -name '*.cpp' | xargs $(BIN)/clang-format -i
	$(BIN)/ruff check --fix-only .
	$(BIN)/ruff format .

docs: build .venv/.docs  ## the documentation as a site, in build/docs; every warning is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# The sanitizers' runtimes must come first in a process, before an uninstrumented Python; libstdc++
# comes along because they look up its throw at start-up. The thread sanitizer cannot live with the
# address randomisation of some kernels; setarch turns it off where it may. What it reports is an
# error in whichever process it happens, also in a worker of pytest's, whose status nobody looks at.
SANITIZED := --hypothesis-profile=quick
FIXED_ADDRESSES = $(shell setarch -R true 2>/dev/null && echo setarch -R)
STDCXX = $(shell $(CXX) -print-file-name=libstdc++.so)

# Leaks count where the core is on the stack. Python's objects come from malloc here, because the leak
# checker does not look for pointers in Python's own arenas, which are mapped; what importing the core
# makes (types, functions, their names) lives as long as the process: tests/leaks.supp leaves it out.
asan: build .venv/.checks build/asan/.installed  ## tests under asan, and ubsan in the core
	rm -f build/asan/report.*
	PYTHONPATH=$(CURDIR)/build/asan/site LD_PRELOAD="$$($(CXX) -print-file-name=libasan.so) $(STDCXX)" \
	ASAN_OPTIONS='log_path=$(CURDIR)/build/asan/report:stack_trace_format="    #%n %f %S %m"' \
	UBSAN_OPTIONS=print_stacktrace=1 PYTHONMALLOC=malloc \
	LSAN_OPTIONS=exitcode=0:print_suppressions=0:suppressions=$(CURDIR)/tests/leaks.supp \
	$(PYTEST) --capture=sys --sanitized=asan $(SANITIZED) || { cat build/asan/report.*; exit 1; }
	! grep -B 9 -A 9 '/offcore/_core\.' build/asan/report.*

tsan: build .venv/.checks build/tsan/.installed  ## tests under the thread sanitizer
	rm -f build/tsan/report.*
	PYTHONPATH=$(CURDIR)/build/tsan/site LD_PRELOAD="$$($(CXX) -print-file-name=libtsan.so) $(STDCXX)" \
	TSAN_OPTIONS=die_after_fork=0:log_path=$(CURDIR)/build/tsan/report:suppressions=$(CURDIR)/tests/tsan.supp \
	$(FIXED_ADDRESSES) $(PYTEST) --capture=sys --sanitized=tsan $(SANITIZED) \
	|| { cat build/tsan/report.*; exit 1; }
	! cat build/tsan/report.* 2>/dev/null | grep .

clean:  ## remove .venv and everything that was built
	rm -rf .venv build dist demo-out reproduce-out .pytest_cache .hypothesis .mypy_cache .ruff_cache
	find . -name __pycache__ -prune -exec rm -rf {} +

.venv/.tools: pyproject.toml
	@$(PY) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { \
	  echo "offcore needs Python 3.10 or newer: choose one with 'make PY=/path/to/python3'"; exit 1; }
	@$(PY) -c 'import venv, ensurepip' 2>/dev/null || { \
	  echo "$(PY) has no venv module: install it (Debian, Ubuntu: apt install python3-venv)"; exit 1; }
	@$(PY) -c 'import os, sysconfig as s; os.stat(s.get_path("include") + "/Python.h")' 2>/dev/null || { \
	  echo "$(PY) has no headers: install them (Debian, Ubuntu: apt install python3-dev)"; exit 1; }
	@command -v $(CXX) >/dev/null || { \
	  echo "$(CXX) not found: install g++ 12 or newer, or choose another with 'make CXX=...'"; exit 1; }
	$(PY) -m venv .venv
	$(BIN)/pip install -q 'scikit-build-core>=1.1' 'nanobind>=2.4' cmake ninja
	touch $@

.venv/.installed: .venv/.tools $(SOURCES) CMakeLists.txt
	@echo "building offcore into .venv: a minute or two the first time"
	$(BIN)/pip install -q --no-build-isolation '.[plot]'
	touch $@

# What tests and lint need, which the demo does not wait for.
.venv/.checks: pyproject.toml | .venv/.installed
	$(BIN)/pip install -q 'offcore[test,lint]'
	touch $@

.venv/.docs: .venv/.tools pyproject.toml
	$(BIN)/pip install -q 'mkdocs-material>=9.5' 'mkdocstrings[python]>=0.27' ruff
	touch $@

build/%/.installed: .venv/.tools $(SOURCES) CMakeLists.txt CMakePresets.json
	cmake --preset $* -DPython_EXECUTABLE=$(CURDIR)/$(BIN)/python
	cmake --build --preset $*
	rm -rf build/$*/site
	cmake --install build/$* --prefix build/$*/site
	cp -R python/offcore build/$*/site/
	$(BIN)/python -m compileall -q build/$*/site  # every process of the tests imports it
	touch $@
