# `make demo` on a fresh machine: an environment in .venv, then the example study. `make check` is what CI runs.
# PYTHON chooses the interpreter; TORCH what is installed as torch, e.g. `make TORCH='torch>=2.6' demo` to keep the one that pip prefers.

PYTHON ?=
TORCH ?= torch==2.13.0
STUDY ?= studies/code-gpt/study.yaml
PYTEST_ARGS ?=
PIP_ARGS ?=
# A folder for each script, so that no answer to another one is judged with them.
PEERS ?= .cache/peers$(addprefix -,$(basename $(notdir $(SCRIPT))))

RUN := .venv/bin/python
# The checksum of path and torch: an editable install holds its path, so a tree that was moved or copied installs itself again.
STAMP := .venv/.installed-$(shell printf '%s %s' "$$PWD" '$(TORCH)' | cksum | cut -d' ' -f1)
export PATH := $(CURDIR)/.venv/bin:$(PATH)
export PYTHONNOUSERSITE := 1
export AUTOTUNE_CACHE ?= $(CURDIR)/.cache/autotune

.DELETE_ON_ERROR:
.NOTPARALLEL:
.PHONY: help install engines demo bench bench-peers floors newest test lint format types imports check audit clean

help: ## this list
	@sed -n 's/^\([a-z-]*\):[^#]*## \(.*\)/  make \1~\2/p' Makefile | tr '~' '\t' | expand -t 20

install: $(STAMP) ## the environment in .venv

# What the tests of engines start on this machine's loopback. Nothing here may fail: what cannot be installed is skipped by its tests, aloud.
engines: $(STAMP) ## Slurm, Ray, ssh, PostgreSQL and a browser, for the tests that run on them
	@mkdir -p .cache; missing=; for command in slurmctld slurmd munged ssh sshd ip chromium; do \
	  command -v "$$command" >/dev/null || missing="$$missing $$command"; \
	done; \
	ls /usr/lib/postgresql/*/bin/postgres >/dev/null 2>&1 || command -v postgres >/dev/null || missing="$$missing postgres"; \
	if test -z "$$missing"; then :; \
	elif test "$$(id -u)" != 0; then \
	  echo 'make engines: not root, so'"$$missing"' cannot be installed; the tests that need them will be skipped' >&2; \
	elif ! command -v apt-get >/dev/null; then \
	  echo 'make engines: no apt-get here; install Slurm, munge, sshd, iproute2, PostgreSQL and chromium by hand, or their tests will be skipped' >&2; \
	elif ! { apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends \
	  slurm-wlm munge openssh-client openssh-server iproute2 chromium postgresql; } </dev/null >.cache/engines.log 2>&1; then \
	  echo 'make engines: apt-get failed, so tests of Slurm, ssh, PostgreSQL and pages may be skipped; its last words:' >&2; tail -n 3 .cache/engines.log >&2; \
	fi
	@$(RUN) -c 'import ray' 2>/dev/null || $(RUN) -m pip install --quiet --no-input --progress-bar off -e '.[ray]' </dev/null \
	  || echo 'make engines: Ray could not be installed; its tests will be skipped' >&2

demo: $(STAMP) ## tune the example study and print its front
	@.venv/bin/autotune run $(STUDY)

bench-peers: $(STAMP) ## DeepSpeed's autotuner, TPE, random search and autotune on one script, each answer measured again (half an hour)
	@$(RUN) -m pip install --quiet --no-input --progress-bar off tabulate </dev/null # DeepSpeed's autotuner does not ask for it
	@for tuner in deepspeed autotune autotune-quick autotune-all tpe random; do \
	  PYTHONPATH=. $(RUN) benchmarks/peers.py run $$tuner --into $(PEERS) $(if $(SCRIPT),--script $(SCRIPT)) $(if $(BASE),--base $(BASE)); done
	@PYTHONPATH=. $(RUN) benchmarks/peers.py judge $(PEERS)

bench: engines ## every figure of the README, measured anew, and the table there (hours on an idle machine; NAMES="ask gate": only these)
	@PYTHONPATH=. $(RUN) benchmarks/figures.py run $(NAMES)

# Each in an environment of its own, so that what is tested stays as it is. PIP_ARGS goes to pip, e.g. an index with a torch for CPUs.
floors: $(STAMP) ## a small study on the oldest releases that pyproject.toml allows, in .cache/floors (downloads gigabytes)
	@test -x .cache/floors/bin/pip || $(RUN) -m venv --clear .cache/floors
	@.cache/floors/bin/python .ci/floors.py >.cache/floors.txt
	@.cache/floors/bin/pip install --quiet --no-input --progress-bar off $(PIP_ARGS) -r .cache/floors.txt </dev/null
	@.cache/floors/bin/pip install --quiet --no-input --progress-bar off --no-deps --force-reinstall . </dev/null
	@$(call small_study,floors)
	@echo 'make floors: the oldest releases work'

newest: ## the same on the newest Python that is installed here, in .cache/newest (may download gigabytes)
	@mkdir -p .cache; newest=$$(for python in python3.12 python3.13 python3.14 python3.15 "$${PYENV_ROOT:-$$HOME/.pyenv}"/versions/3.*/bin/python; do \
	  "$$python" -c 'import sys, venv, ensurepip; sys.version_info >= (3, 12) and print(*sys.version_info[:3], sys.executable)' 2>/dev/null; \
	done | sort -n -k 2,2 -k 3,3 | tail -n 1 | cut -d ' ' -f 4-); \
	if test -z "$$newest"; then echo 'make newest: no Python newer than 3.11 is installed here' >&2; exit 1; fi; \
	test -x .cache/newest/bin/pip || "$$newest" -m venv --clear .cache/newest
	@.cache/newest/bin/pip install --quiet --no-input --progress-bar off $(PIP_ARGS) '$(TORCH)' . </dev/null
	@$(call small_study,newest)
	@echo "make newest: $$(.cache/newest/bin/python --version) works"

# $(1): an environment below .cache that has autotune.
define small_study
rm -rf .cache/$(1)-study && mkdir .cache/$(1)-study && cd .cache/$(1)-study && unset PYTHONPATH && export AUTOTUNE_CACHE="$$PWD/cache" \
  && autotune=../$(1)/bin/autotune && $$autotune init first && $$autotune run first/study.yaml --ranks 2 --trials 4 --space batch,zero \
  && $$autotune export first -o ds_config.json && $$autotune report first
endef

test: $(STAMP) ## run the tests
	@$(RUN) -m pytest $(PYTEST_ARGS)

lint: $(STAMP) ## style and formatting
	@$(RUN) -m ruff check .
	@$(RUN) -m ruff format --check .

format: $(STAMP) ## put style and formatting right
	@$(RUN) -m ruff check --fix .
	@$(RUN) -m ruff format .

types: $(STAMP) ## mypy, strict on autotune
	@$(RUN) -m mypy

imports: $(STAMP) ## imports point down only
	@$(RUN) -c 'from importlinter.cli import lint_imports_command as main; main(prog_name="lint-imports")' --no-logo --cache-dir .cache/imports

check: lint types imports test ## all of these

# Not part of check: it asks the Python Packaging Advisory Database over the network, and what it says changes from day to day.
audit: $(STAMP) ## known vulnerabilities of what is installed in .venv
	@test -x .cache/audit/bin/pip-audit || { $(RUN) -m venv .cache/audit && \
	  .cache/audit/bin/python -m pip install --quiet --no-input --progress-bar off pip-audit </dev/null; }
	@.cache/audit/bin/pip-audit --format json --progress-spinner off --skip-editable \
	  --path "$$($(RUN) -c 'import sysconfig; print(sysconfig.get_path("purelib"))')" 2>/dev/null | $(RUN) .ci/audit.py

clean: ## remove environment, caches and what builds leave
	rm -rf .venv .cache .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache dist build *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(STAMP): pyproject.toml
	@if ! .venv/bin/python -m pip --version >/dev/null 2>&1; then \
	  set -- '$(PYTHON)'; test -n "$$1" || set -- python3 python3.13 python3.12 python3.11 python; \
	  for python in "$$@"; do \
	    "$$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && break; python=; \
	  done; \
	  if test -z "$$python"; then \
	    echo "autotune needs Python 3.11 or newer, and none was found as: $$*. Install one, or name it: make PYTHON=/path/to/python3.11" >&2; exit 1; \
	  fi; \
	  if ! "$$python" -c 'import venv, ensurepip' 2>/dev/null; then \
	    echo "$$python cannot make environments: install its venv module (on Debian and Ubuntu the package python3-venv)." >&2; exit 1; \
	  fi; \
	  echo "Making .venv with $$("$$python" --version)"; \
	  "$$python" -m venv --clear .venv; \
	fi
	@echo 'Installing $(TORCH), then autotune and the rest, into .venv (once; takes a minute or two)'
	@$(RUN) -m pip install --quiet --no-input --progress-bar off '$(TORCH)' </dev/null
	@$(RUN) -m pip install --quiet --no-input --progress-bar off -e '.[dev]' </dev/null
	@rm -f .venv/.installed-* && touch $@
