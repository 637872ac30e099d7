# `make demo` on a fresh machine: an environment in .venv, then the example study. `make check` is what CI runs.
# PYTHON chooses the interpreter; TORCH what is installed as torch, e.g. `make TORCH='torch>=2.6' demo` to keep the one that pip prefers.

PYTHON ?=
TORCH ?= torch==2.13.0
STUDY ?= studies/code-gpt/study.yaml
PYTEST_ARGS ?=
PIP_ARGS ?=
# Workers of the tests; two trials share two cores, and more than eight workers only share memory.
WORKERS ?= $(shell n=$$(nproc 2>/dev/null || echo 2); test $$n -lt 8 && echo $$n || echo 8)

RUN := .venv/bin/python
# The checksum of path and torch: an editable install holds its path, so a tree that was moved or copied installs itself again.
STAMP := .venv/.installed-$(shell printf '%s %s' "$$PWD" '$(TORCH)' | cksum | cut -d' ' -f1)
export PATH := $(CURDIR)/.venv/bin:$(PATH)
export PYTHONNOUSERSITE := 1
# Where it is set, each command would compile all modules anew, for up to a second.
unexport PYTHONDONTWRITEBYTECODE
export AUTOTUNE_CACHE ?= $(CURDIR)/.cache/autotune

.DELETE_ON_ERROR:
.NOTPARALLEL:
.PHONY: help install engines demo face bench bench-peers pages pages-current floors newest test test-unit test-smoke test-system \
  lint format types imports reference check audit plotly clean test-cuda-build

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

# The example study is one for two processes: they take the CPU where a machine has one GPU, and where its driver is too old.
ON_CPU := $(if $(filter file,$(origin STUDY)),DS_ACCELERATOR=$${DS_ACCELERATOR:-cpu})
demo: $(STAMP) ## tune the example study and print its front
	@$(ON_CPU) .venv/bin/autotune run $(STUDY)

face: $(STAMP) ## after `make demo`: the README's output and docs/report.png from the example study's answer (needs Chromium)
	@PYTHONPATH=. $(RUN) benchmarks/face.py

bench-peers: $(STAMP) ## DeepSpeed's autotuner and autotune on three trainings, each answer measured again (two hours)
	@$(RUN) -m pip install --quiet --no-input --progress-bar off tabulate </dev/null # DeepSpeed's autotuner does not ask for it
	@PYTHONPATH=. $(RUN) benchmarks/peers.py race .cache/peers
	@PYTHONPATH=. $(RUN) benchmarks/peers.py judge .cache/peers

bench: engines ## measure the figures and write their table (NAME=ask: only that one; all take hours on an idle machine)
	@PYTHONPATH=. $(RUN) benchmarks/figures.py run $(NAME) $(NAMES)

PAGES := docs/develop/figures.md docs/develop/comparison.md docs/develop/gpu.md docs/clusters.md

pages: $(STAMP) ## write the tables of figures.md, comparison.md and gpu.md in docs/develop, and of docs/clusters.md, from benchmarks/results
	@$(RUN) benchmarks/figures.py

pages-current: $(STAMP) ## fail if `make pages` changes a page
	@mkdir -p .cache/pages && cp $(PAGES) .cache/pages/
	@$(MAKE) --no-print-directory pages >/dev/null
	@for page in $(PAGES); do diff -u ".cache/pages/$${page##*/}" "$$page" \
	  || { echo "make pages changed $$page: its tables were not those of benchmarks/results" >&2; exit 1; }; done

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

# torch alone is another one than in .venv, which lends the rest. Three minutes and 5 GB, so it is no part of CI; a folder of wheels
# for CPUs, as pip may be set up with, would win over the CUDA build.
test-cuda-build: $(STAMP) ## torch's CUDA build without a device: import, warm ranks, a trial, gpu.sh --pack and --dry-run, in .cache/cuda (5 GB)
	@test -x .cache/cuda/bin/pip || { mkdir -p .cache && $(RUN) -m venv --clear .cache/cuda \
	  && echo "import site; site.addsitedir('$$($(RUN) -c 'import sysconfig; print(sysconfig.get_path("purelib"))')')" \
	  >"$$(.cache/cuda/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/rest.pth"; }
	@.cache/cuda/bin/python -c 'import sys, torch; sys.exit(not torch.version.cuda)' 2>/dev/null || PIP_CONFIG_FILE=/dev/null PIP_FIND_LINKS= \
	  PIP_EXTRA_INDEX_URL= .cache/cuda/bin/pip install --quiet --no-input --progress-bar off --no-compile --ignore-installed '$(TORCH)' </dev/null
	@PYTHONPATH=. .cache/cuda/bin/python .ci/cuda_build.py
	@PYTHON=.cache/cuda/bin/python benchmarks/gpu.sh --pack
	@rm -rf .cache/gpu-cuda-build && PYTHON=.cache/cuda/bin/python benchmarks/gpu.sh --dry-run --out .cache/gpu-cuda-build

# $(1): an environment below .cache that has autotune.
define small_study
rm -rf .cache/$(1)-study && mkdir .cache/$(1)-study && cd .cache/$(1)-study && unset PYTHONPATH && export AUTOTUNE_CACHE="$$PWD/cache" \
  && autotune=../$(1)/bin/autotune && $$autotune init first && $$autotune run first/study.yaml --ranks 2 --trials 4 --space batch,zero \
  && $$autotune export first -o ds_config.json && $$autotune report first
endef

# By file, so that the tests of a file share its studies (under pytest 9.2 the groups of pytest-xdist 3.8 are of no effect),
# in the order of tests/support/lanes.py.
# A test without a mark is in the lane `unit`; tests/support/lanes.py keeps it to that.
test: $(STAMP) ## run the tests that need no service of the machine (unit and process; PYTEST_ARGS="-k name", WORKERS=2)
	@$(RUN) -m pytest -m 'not system' -n $(WORKERS) --dist loadfile --no-loadscope-reorder $(PYTEST_ARGS)

test-unit: $(STAMP) ## only the tests that start no process (three minutes)
	@$(RUN) -m pytest -m unit -n $(WORKERS) --dist loadfile $(PYTEST_ARGS)

test-smoke: engines ## one study on each engine and on stand-in GPUs, PostgreSQL, pages in a browser, every legal pair of settings, slow runs of trials: the part of test-system that CI runs
	@$(RUN) -m pytest -m 'system and smoke' $(PYTEST_ARGS)

test-system: engines ## all tests on Slurm, Ray, ssh, PostgreSQL and in a browser, then floors, newest and test-cuda-build (before a release; an hour and a half)
	@$(RUN) -m pytest -m system $(PYTEST_ARGS)
	@for edge in floors newest test-cuda-build; do $(MAKE) --no-print-directory $$edge || exit 1; done

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

reference: $(STAMP) ## docs/reference.md from the program; fails where the page in git says something else
	@$(RUN) .ci/reference.py >docs/reference.md && git diff --exit-code --stat docs/reference.md

check: lint types imports reference pages-current test ## lint, types, imports, reference, pages-current and test

# Not part of check: it asks the Python Packaging Advisory Database over the network, and what it says changes from day to day.
audit: $(STAMP) ## known vulnerabilities of what is installed in .venv
	@test -x .cache/audit/bin/pip-audit || { $(RUN) -m venv .cache/audit && \
	  .cache/audit/bin/python -m pip install --quiet --no-input --progress-bar off pip-audit </dev/null; }
	@.cache/audit/bin/pip-audit --format json --progress-spinner off --skip-editable \
	  --path "$$($(RUN) -c 'import sysconfig; print(sysconfig.get_path("purelib"))')" 2>/dev/null | $(RUN) .ci/audit.py

# Of the same release as the one in the package plotly, so that figures look alike in page, notebook and PNG.
plotly: $(STAMP) ## refresh the vendored plotly.js of the report's page (needs npm)
	@version=$$($(RUN) -c 'from plotly.offline import get_plotlyjs_version as v; print(v())') && cd .cache && rm -rf package \
	  && npm pack --silent "plotly.js-basic-dist-min@$$version" | xargs tar xzf && cp package/plotly-basic.min.js ../autotune/report/page/assets/ \
	  && cp package/LICENSE ../autotune/report/page/assets/LICENSE.plotly && rm -rf package plotly.js-basic-dist-min-*.tgz

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
