# Every target sets up what it needs, from nothing, and can be run again.
PYTHON ?= python3
VENV := .venv
READY := $(VENV)/.ready
BIN := $(VENV)/bin
# CuPy, whose NCCL binding the tests run on a double of NCCL, without a GPU; cuda13 for
# a torch built for CUDA 13, or nothing: the tests that need it are then skipped.
CUPY ?= cuda12
comma := ,

.PHONY: train test sweep sweep-placements fuzz lint bench bench-full clean

train: $(READY)
	$(BIN)/dtensor-run -n 4 examples/train_lm.py --mesh dp=2,tp=2

# An MPI job that was killed leaves its shared memory behind; a running one needs it
# only while it starts.
test: $(READY)
	@find /dev/shm -maxdepth 1 \( -name 'mpich_shm_*' -o -name 'ucx_shm_*' \) \
		-user "$$(id -u)" -mmin +5 -delete 2>/dev/null || true
	$(BIN)/python -m pytest -n 2 --dist loadfile -q

# Every pair of placements on every small mesh, moved and planned, and how many there
# are; the tests run a slice of it.
sweep-placements: $(READY)
	DTENSOR_SWEEP=1 $(BIN)/python -m pytest -n 2 -q tests/test_placements_sweep.py \
		tests/test_placements_order.py tests/test_placements_plan.py

# Every op of torch's own test database, in every layout; writes docs/ops.md.
sweep: $(READY)
	$(BIN)/python tests/run_op_sweep.py --write

# Random programs on shards against plain torch; DTENSOR_FUZZ_SEED chooses others.
fuzz: $(READY)
	DTENSOR_FUZZ=10000 $(BIN)/python -m pytest -n 2 -q tests/test_fuzz.py

lint: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

# What an op costs, in a minute. All suites, and the page docs/benchmarks.md:
bench: $(READY)
	$(BIN)/python -m benchmarks dispatch

bench-full: $(READY)
	$(BIN)/python -m benchmarks --json out/benchmarks.json --report docs/benchmarks.md

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q --disable-pip-version-check \
		-c constraints.txt -e '.[mpich,examples,test$(addprefix $(comma),$(CUPY))]'
	touch $(READY)

clean:
	rm -rf $(VENV) out *.egg-info
