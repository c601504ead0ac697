# Two commands matter to a newcomer: `make demo` and `make test`. Both set themselves up.
PYTHON ?= python3
PYVER := $(shell $(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])')
VENV := .venv/$(PYVER)
BIN := $(VENV)/bin
PYTEST := $(BIN)/python -m pytest
HOPPER := $(wildcard tests/kernels/test_pallas_gpu*.py)

.PHONY: setup demo test test-all test-op test-kernels test-hopper test-gpu smoke bench bench-tpu bench-gpu charts lint matrix docs dist clean

setup: $(VENV)/.core

$(VENV)/.core: pyproject.toml
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; (3, 11) <= v < (3, 14) or sys.exit("ejkernel needs Python 3.11 to 3.13; %s is %d.%d. Try: make PYTHON=python3.12 ..." % (sys.executable, *v))'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --editable .
	@touch $@

$(VENV)/.test: $(VENV)/.core
	$(BIN)/python -m pip install --quiet --editable '.[test]'
	@touch $@

$(VENV)/.lint: $(VENV)/.core
	$(BIN)/python -m pip install --quiet --editable '.[lint]'
	@touch $@

$(VENV)/.docs: $(VENV)/.core
	$(BIN)/python -m pip install --quiet --editable '.[docs]'
	@touch $@

# JAX in this environment is for the CPU; unless told so, it would also try libtpu once `test` has installed it.
demo: $(VENV)/.core
	JAX_PLATFORMS=$${JAX_PLATFORMS:-cpu} $(BIN)/python examples/demo.py

test: $(VENV)/.test
	$(PYTEST) -n 2 --dist loadgroup -m 'not slow'

test-all: $(VENV)/.test
	$(PYTEST) -n 2 --dist loadgroup --optimised

# On a machine with a GPU, with the Python that has its JAX: make test-gpu PYTHON=python3
# SHORT=1: of the tests that repeat every case for every dtype and kind of configuration only bfloat16
# as a user runs it, and none that only compile. It writes no results: those are of all tests.
# RESUME=1 leaves out kernels that passed before, by the results, and have not changed since.
GPU_WORKERS ?= 4
GPU_LEFT_OUT := lower or compiles or candidates or refused or (everywhere and not bfloat16-heuristic)
GPU_TESTS := tests/kernels tests/callib -k '(triton or cuda or cudnn or test_gpu or pallas_gpu)$(if $(SHORT), and not ($(GPU_LEFT_OUT)))' --deselect tests/kernels/test_triton_compiles.py --deselect tests/kernels/test_compiles.py
GPU_MATRIX := benchmarks/results/gpu_matrix.json
GPU_RESULTS := $(if $(SHORT),,--device-results $(GPU_MATRIX)) $(if $(RESUME),--untested-in $(GPU_MATRIX))

# Oracles and Triton kernels that `python -m tests.kernels.ahead` made, on any machine, are read from .cache.
test-gpu:
	EJKERNEL_TEST_GPU=1 EJKERNEL_CACHE_DIR=$${EJKERNEL_CACHE_DIR:-$(CURDIR)/.cache} PYTHONPATH=$(CURDIR) $(PYTHON) -m pytest -p no:benchmark -n $(GPU_WORKERS) $(GPU_TESTS) $(ONE_OP) $(GPU_RESULTS)

# One op: make test-op OP=page_attention, make test-kernels OP=page_attention, make test-gpu OP=page_attention
ONE_OP := $(if $(OP),--op $(OP))

test-op: $(VENV)/.test
	@[ -n "$(OP)" ] || { echo "name an op: make test-op OP=page_attention"; exit 2; }
	$(PYTEST) -n 2 --dist loadgroup -m 'not slow' $(ONE_OP)

# The kernel tests of `make test`; the support tables then tell what they found (`make matrix`).
test-kernels: $(VENV)/.test
	$(PYTEST) -n 2 --dist loadgroup -m 'not slow' tests/kernels $(ONE_OP) --device-results benchmarks/results/cpu_matrix.json

# Hopper's kernels in Mosaic's interpreter, which JAX 0.12 has: make test-hopper PYTHON=python3.13
test-hopper: $(VENV)/.test
	$(PYTEST) -n 2 --dist loadgroup $(HOPPER) --device-results benchmarks/results/cpu_hopper_matrix.json

# A short suite for the other Python versions.
SMOKE := tests/test_import.py tests/ops/test_kernel.py tests/ops/test_registry.py tests/kernels/test_effects.py tests/kernels/test_transforms.py $(HOPPER)

smoke: $(VENV)/.test
	$(PYTEST) -n 2 --dist loadgroup -m 'not slow' $(SMOKE)

# Every file is a run of its own: one of them needs several simulated devices. `make bench SAVE=1`
# writes benchmarks/results/.
bench: $(VENV)/.core
	@for f in benchmarks/cpu_*.py; do echo "$$f"; name=$$(basename $$f .py); \
	$(BIN)/ejkernel bench --workloads $$f --bars $(if $(SAVE),--out benchmarks/results/$$name.json) $(BENCH) || failed="$$failed $$f"; done; \
	[ -z "$$failed" ] || { echo "below a bar in:$$failed"; exit 1; }

# Cycles of TPU kernels beside JAX's own, from compiled schedules: needs no TPU.
bench-tpu: $(VENV)/.test
	$(BIN)/python benchmarks/tpu_static.py --ops flash_attention $(if $(SAVE),--out benchmarks/results/tpu_static.json) $(BENCH)
	$(BIN)/python benchmarks/tpu_static.py --ops blocksparse_attention linear_recurrence $(if $(SAVE),--out benchmarks/results/tpu_static_more.json) $(BENCH)
	$(BIN)/python benchmarks/tpu_static.py --ops recurrent $(if $(SAVE),--out benchmarks/results/tpu_static_recurrent.json) $(BENCH)

# Needs a GPU, in the Python that is named; measures beside the peers that it has, file by file.
# Two scripts of another kind stand among them: for a memory checker, and for many repetitions.
GPU_BENCHMARKS := $(filter-out %/gpu_memcheck.py %/gpu_hopper_soak.py,$(wildcard benchmarks/gpu_*.py))

bench-gpu:
	@for f in $(GPU_BENCHMARKS); do echo "$$f"; name=$$(basename $$f .py); \
	PYTHONPATH=$(CURDIR) $(PYTHON) -m ejkernel bench --workloads $$f --threads 12 --timeout 180 --bars --out benchmarks/results/$$name.json $(BENCH) || failed="$$failed $$f"; done; \
	[ -z "$$failed" ] || { echo "below a bar in:$$failed"; exit 1; }

# SVG bars for README and docs, from the results that are kept.
charts: $(VENV)/.core
	$(BIN)/python -m ejkernel.bench._charts --write

matrix: $(VENV)/.test
	$(BIN)/python -m ejkernel.kernels._support --write
	JAX_PLATFORMS=cpu $(BIN)/python -m tools --write

# The site, in site/; a warning is an error, and nothing is fetched.
docs: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

# Wheel and source archive in dist/, checked in fresh environments.
dist: $(VENV)/.core
	$(BIN)/python -m pip install --quiet --editable '.[release]'
	rm -rf dist
	$(BIN)/python -m build --outdir dist
	$(BIN)/python -m tools.check_dist

lint: $(VENV)/.lint $(VENV)/.test
	$(BIN)/ruff check ejkernel tests benchmarks examples tools
	$(BIN)/ruff format --check ejkernel tests benchmarks examples tools
	$(BIN)/lint-imports
	$(BIN)/pyright --pythonpath $(BIN)/python

clean:
	rm -rf .venv .cache .pytest_cache site dist
