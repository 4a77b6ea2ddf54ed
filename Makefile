# make demo    everything a user needs, then the demo
# make test    everything CI checks on a machine without a GPU
# make PYTHON=python3.12 ... picks the Python (>= 3.11) that .venv is made from.

PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
CXX ?= c++
# A fresh environment has no bytecode: every interpreter would compile torch's modules again.
unexport PYTHONDONTWRITEBYTECODE

SANITIZERS := -fsanitize=address,undefined -fno-sanitize-recover=all
CTEST_FLAGS := -std=c11 -O2 -Wall -Wextra -Werror -Icsrc -Itests/c
C_EXAMPLES := $(basename $(notdir $(wildcard examples/c/*.c)))
CTESTS := $(basename $(notdir $(wildcard tests/c/test_*.c examples/c/*.c)))
# Of the GPUs here, as setup.py names them; nothing, its default, where there are none.
GPU_ARCHS = $$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2> /dev/null | \
  sort -u | sed 's/\.//; s/^90$$/90a/' | paste -sd ';' -)
# Of wheels, unless torch's own variable names others.
RELEASE_ARCHS = $(if $(TORCH_CUDA_ARCH_LIST),,release)
C_FILES = $(shell find csrc tests/c tests/cuda examples/c -name '*.[ch]' -o -name '*.cu' -o -name '*.cuh')

# What CI compiles of the CUDA kernels, and `make test` where no GPU runs them: minutes instead of most
# of an hour. Of the bfloat16 GEMM the smallest and the largest tile of each format, without
# optimization, portable code for 8.0 alone: other tiles and float16 are the same code with other
# template arguments. MOELORA_CUDA_FAST=0 MOELORA_VARIANTS= MOELORA_CUDA_ARCH=release make test
# compiles what wheels have.
ifneq ($(filter test,$(MAKECMDGOALS)),)
ifneq ($(FEW_KERNELS)$(shell nvidia-smi -L > /dev/null 2>&1 || echo 1),)
export MOELORA_CUDA_FAST ?= 1
export MOELORA_VARIANTS ?= _bf16_(\w+_)?(16|128)x128x
export MOELORA_CUDA_ARCH ?= 80
endif
endif

.PHONY: demo test nightly build lint conformance test-c test-py test-lowest test-newest test-pythons \
        test-quantizers sanitize fuzz test-gpu sanitize-gpu emulate emulate-few bench-cpu bench-gpu tables docs types \
        wheel check-wheel sdist clean

# The demo runs on the CPU, so that comes first: half a minute of C. Then the CUDA kernels, where there
# is a GPU to run them, and only for its architecture.
demo:
	MOELORA_CUDA=0 $(MAKE) --no-print-directory build
	$(PY) examples/demo.py
	@test "$${MOELORA_CUDA:-1}" = 0 || { test -z "$$MOELORA_CUDA" && ! nvidia-smi -L > /dev/null 2>&1; } || { \
	  echo "That was the demo. Now the CUDA kernels for this machine, some minutes:"; \
	  test -n "$$MOELORA_CUDA_ARCH$$TORCH_CUDA_ARCH_LIST" || export MOELORA_CUDA_ARCH="$(GPU_ARCHS)"; \
	  $(MAKE) --no-print-directory build; }

# What CI holds against us, users do not see: warnings and register spills are errors here only. The
# tests in C run under sanitizers, in pytest; without them only the examples do.
test: export MOELORA_WERROR = 1
test: build
	$(MAKE) --no-print-directory -j 3 lint types conformance test-c test-py CTESTS='$(C_EXAMPLES)'

# `make test` and the checks that CI has no time for: all parametrizations and slow tests
# (tests/support/covering.py), all GEMM variants and architectures, the emulation of both families
# with all copies, sanitizers, random arguments, the lowest versions of transformers and PEFT.
nightly: export MOELORA_NIGHTLY = 1
nightly: export MOELORA_CUDA_ARCH ?= $(RELEASE_ARCHS)
nightly: test
	$(MAKE) --no-print-directory test-c emulate sanitize fuzz test-lowest

# torch by itself first: the other packages then find it there and cannot pull in another one. Without a
# GPU it is torch's CPU build, unless pip is configured with indexes or folders of its own. Modules
# are compiled when they are imported, which most of these never are.
TORCH_CPU := https://download.pytorch.org/whl/cpu
$(VENV)/.ready: requirements-torch.txt requirements.txt
	@$(PYTHON) -c '' || \
	  { echo "PYTHON is $(PYTHON), which does not start: make PYTHON=... names a Python >= 3.11"; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "moelora's demo and tests need Python >= 3.11: make PYTHON=python3.12 ..."; exit 1; }
	test -x $(PY) || $(PYTHON) -m venv $(VENV)
	@set -e; index=; size="for the CPU: 0.2 GB"; \
	if $(PY) -m pip config list 2> /dev/null | grep -Eq '(index-url|find-links)='; then \
	  size="from the indexes of pip's configuration: 0.2 GB for the CPU, 2 to 3 with CUDA's libraries"; \
	elif nvidia-smi -L > /dev/null 2>&1; then size="with CUDA's libraries: 2 to 3 GB"; \
	else index="--extra-index-url $(TORCH_CPU)"; fi; \
	echo "pip downloads torch $$size; then other packages: 0.2 GB"; \
	$(PY) -m pip install --quiet --no-compile $$index $$(cat requirements-torch.txt)
	$(PY) -m pip install --quiet --no-compile -r requirements.txt
	touch $@

build: $(VENV)/.ready
	$(PY) setup.py -q build_ext --inplace
	@$(MAKE) --no-print-directory $(VENV)/.editable

$(VENV)/.editable: $(VENV)/.ready pyproject.toml
	$(PY) -m pip install --quiet --no-deps --no-build-isolation -e .
	touch $@

lint: $(VENV)/.ready
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/clang-format --dry-run -Werror $(C_FILES)
	$(VENV)/bin/hadolint examples/Dockerfile.*

# mypy --strict.
types: $(VENV)/.ready
	$(VENV)/bin/mypy

# Our prototypes of torch's C functions against torch's own headers.
conformance: $(VENV)/.ready
	@if command -v $(CXX) > /dev/null; then \
	  $(CXX) -std=c++20 -fsyntax-only -Wall -Werror -Icsrc tests/c/abi_conformance.cpp -I$$($(PY) -c \
	    'import importlib.util as u; print(u.find_spec("torch").submodule_search_locations[0])')/include \
	  && echo "conformance: csrc/glue/abi.h agrees with torch's headers"; \
	else echo "conformance: NOT CHECKED, there is no C++ compiler ($(CXX))"; fi

test-c: $(VENV)/.ready
	$(PY) setup.py -q build_core
	$(MAKE) --no-print-directory run-c WHERE=build/core

sanitize: $(VENV)/.ready
	MOELORA_SANITIZE=1 $(PY) setup.py -q build_core
	$(MAKE) --no-print-directory run-c WHERE=build/sanitize \
	  CTEST_FLAGS="$(CTEST_FLAGS) -g $(SANITIZERS)"

# Random arguments, new ones every time, for as long as FUZZ asks: the C interface under sanitizers,
# and damaged adapters.
FUZZ ?= 20
fuzz: build
	MOELORA_SANITIZE=1 $(PY) setup.py -q build_core
	$(MAKE) --no-print-directory build/sanitize/fuzz_api WHERE=build/sanitize \
	  CTEST_FLAGS="$(CTEST_FLAGS) -g $(SANITIZERS)"
	build/sanitize/fuzz_api $$(($(FUZZ) * 50000)) $$(date +%s)000000
	MOELORA_FUZZ=$(FUZZ) OMP_NUM_THREADS=1 $(PY) -m pytest -q -n 2 tests/adapters/test_fuzz_adapters.py

# Programs in C on only libmoelora.a; tests and examples run here, the others are for pytest. RUN runs
# those of a cross compiler:
#   make test-c CC=aarch64-linux-gnu-gcc RUN="qemu-aarch64 -L /usr/aarch64-linux-gnu"
.PHONY: run-c
run-c: $(CTESTS:%=$(WHERE)/%)
	@set -e; for test in $(CTESTS); do echo "$(WHERE)/$$test"; $(RUN) ./$(WHERE)/$$test; done

$(WHERE)/%: tests/c/%.c $(WHERE)/libmoelora.a $(wildcard tests/c/*.h)
	$(CC) $(CTEST_FLAGS) $< -o $@ $(WHERE)/libmoelora.a -lm -lpthread

$(WHERE)/%: examples/c/%.c $(WHERE)/libmoelora.a
	$(CC) $(CTEST_FLAGS) $< -o $@ $(WHERE)/libmoelora.a -lm -lpthread

test-py: build
	OMP_NUM_THREADS=1 $(PY) -m pytest -q -n 2 -m "not gpu" $(PYTEST_ARGS)

# An environment $(1) that borrows every package of $(VENV) that it does not install itself.
define borrowing
	test -x $(1)/bin/python || $(PY) -m venv $(1)
	$(PY) -c 'import torch, pathlib; print(pathlib.Path(torch.__file__).parents[1])' \
	  > "$$($(1)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/borrowed.pth"
endef
HF_TESTS := tests/huggingface/test_transformers*.py tests/huggingface/test_peft*.py tests/adapters/test_peft_layouts.py

# The integration of transformers and PEFT with the oldest of both that pyproject.toml admits.
test-lowest: build
	$(call borrowing,build/lowest)
	build/lowest/bin/python -m pip install --quiet -r requirements-lowest.txt
	OMP_NUM_THREADS=1 build/lowest/bin/python -m pytest -q -n 2 -m "not gpu" $(HF_TESTS) $(PYTEST_ARGS)

# With the newest that the package index has, of both. NEWEST="torch transformers peft" takes its torch
# as well, and runs all tests: on x86-64 that is a CUDA build, with its libraries some gigabytes.
NEWEST ?= transformers peft
test-newest: build
	$(call borrowing,build/newest)
	build/newest/bin/python -m pip install --quiet --upgrade $(NEWEST)
	@build/newest/bin/python -c 'from importlib.metadata import version; \
	  print(*(f"{p} {version(p)}" for p in ("torch", "transformers", "peft")), sep=", ")'
	OMP_NUM_THREADS=1 build/newest/bin/python -m pytest -q -n 2 -m "not gpu" \
	  $(if $(filter torch,$(NEWEST)),tests,$(HF_TESTS)) $(PYTEST_ARGS)

# The Python tests under 3.11 to 3.14, as far as they are here, on one extension.
test-pythons: build
	$(PY) tests/project/check_pythons.py $(CHECK_ARGS) -- $(PYTEST_ARGS)

# Folders as llm-compressor, AutoRound and GPTQModel make them, each in an environment of its own, loaded
# here: nightly, on a CPU. Ends with 1 if one is wrong, or is refused or served where the table in
# docs/weight-formats.md says otherwise; QUANTIZERS="auto-round" for some of them. GPTQModel needs a
# newer torch than ours.
QUANTIZERS ?= llm-compressor auto-round gptqmodel
MADE ?= build/quantized
test-quantizers: build
	set -e; for tool in $(QUANTIZERS); do \
	  test -x build/$$tool/bin/python || $(PY) -m venv build/$$tool; \
	  pins=tests/quantizers/requirements-$$tool.txt; \
	  test $$tool = gptqmodel || pins="$$pins -r requirements-torch.txt"; \
	  build/$$tool/bin/python -m pip install --quiet -r $$pins; \
	  OMP_NUM_THREADS=1 build/$$tool/bin/python tests/quantizers/make_folders.py $$tool $(MADE); done
	OMP_NUM_THREADS=1 $(PY) tests/quantizers/check_folders.py $(MADE) $(MADE)/results.json
	$(PY) tests/quantizers/table.py --compare $(MADE)/results.json

# On GPU machines torch is already there: no venv, the Python of the caller.
test-gpu:
	$(PYTHON) setup.py -q build_ext --inplace
	$(PYTHON) -m pytest -q -m gpu $(PYTEST_ARGS)

# racecheck follows some Hopper barriers only in a build of its own
# (csrc/cuda/gemm/sm90/pipeline.cuh); with -lineinfo the reports name source lines.
sanitize-gpu:
	NVCCFLAGS="-lineinfo -DMOELORA_RACECHECK" $(PYTHON) setup.py -q build_ext --inplace
	$(PYTHON) tests/cuda/sanitize_gpu.py --tools memcheck,initcheck,synccheck,racecheck --jobs 8 \
	  --log build/gpu-sanitize.log
	$(PYTHON) setup.py -q build_ext --inplace

# The CUDA sources without a GPU (tests/emulation): random calls against the CPU, each with the copies
# of the hardware at another time; new ones from EMULATE_FROM on.
EMULATE ?= 60
EMULATE_FROM ?= 0
EMULATE_ARCHS ?= 900 800
emulate:
	@command -v $(CXX) > /dev/null || echo "emulate: NOT RUN, there is no C++ compiler ($(CXX))"
	@set -e; command -v $(CXX) > /dev/null || exit 0; for arch in $(EMULATE_ARCHS); do \
	  $(MAKE) --no-print-directory -s -j 2 -f tests/emulation/Makefile ARCH=$$arch; \
	  build/emulation/$$arch/test_engine; \
	  for copies in now late any; do \
	    EMULATION_CAPABILITY=$${arch%0} EMULATION_COPIES=$$copies \
	      build/emulation/$$arch/compare all $(EMULATE_FROM) $(EMULATE); \
	  done; \
	done

# What CI has the time for, a minute or two: Hopper's sources with a few of the GEMM variants, among
# them each main loop, compiled without optimization, and a handful of calls.
EMULATE_FEW := gemm_bf16_(\w+_)?(16x|96x\d+x\d+_sm90|144x256x64)|bf16_w8a8_128x|back_bf16_(16|96|128x128)x
emulate-few:
	@set -e; test "$$(uname -m)" = x86_64 && command -v $(CXX) > /dev/null || \
	  { echo "emulate-few: NOT RUN, this is not x86-64 or has no C++ compiler ($(CXX))"; exit 0; }; \
	$(MAKE) --no-print-directory -s -j 2 -f tests/emulation/Makefile ARCH=900 OUT=build/emulation/few \
	  MOELORA_VARIANTS='$(EMULATE_FEW)' EXTRA=-O0; \
	build/emulation/few/test_engine; \
	EMULATION_CAPABILITY=90 EMULATION_COPIES=any build/emulation/few/compare all 0 8

# One variant by its name, forced in a few projections and layers: what to run after an edit of a
# kernel. Compiles what includes the edited file, and of the GEMM variants only this one.
#   make emulate-variant VARIANT=gemm_bf16_96x128x64_sm90
.PHONY: emulate-variant
emulate-variant:
	@test -n "$(VARIANT)" || { echo "VARIANT is not set, expected the name of a variant"; exit 1; }
	@$(MAKE) --no-print-directory -s -j 2 -f tests/emulation/Makefile ARCH=900 \
	  OUT=build/emulation/few MOELORA_VARIANTS='^$(VARIANT)$$' EXTRA=-O0 build/emulation/few/compare
	@EMULATION_CAPABILITY=90 EMULATION_COPIES=any build/emulation/few/compare gemm,experts \
	  $(EMULATE_FROM) $(or $(EMULATE_CASES),4) $(VARIANT)

bench-cpu: build
	$(PY) -m benchmarks.layer --device cpu --out benchmarks/results/cpu-layer.json $(BENCH_ARGS)

bench-gpu:
	$(PYTHON) setup.py -q build_ext --inplace
	$(PYTHON) -m moelora bench --device cuda --out build/gpu-layer.json $(BENCH_ARGS)

# The tables and pictures of README and docs, from the result files.
tables: build
	$(PY) -m benchmarks.tables --write

# The site of docs/ with the API reference, in build/site; what mkdocs warns of is an error.
docs: build/docs/.ready
	NO_MKDOCS_2_WARNING=1 build/docs/bin/mkdocs build --strict
	build/docs/bin/python tests/project/check_site.py build/site

# The built site in Chromium: widths, dark mode, search, the console.
.PHONY: docs-browser
docs-browser: docs
	build/docs/bin/python -m pip install --quiet --no-compile playwright==1.65.2
	build/docs/bin/python tests/project/check_browser.py build/site

# One version of the site beside the others, on the branch gh-pages of this checkout: `main`, or a tag,
# which becomes what readers see first. PUSH=--push publishes it.
DOCS_VERSION ?= main
.PHONY: docs-version
docs-version: export MOELORA_DOCS_REF = $(DOCS_VERSION)
docs-version: build/docs/.ready
	set -e; export PATH="$(CURDIR)/build/docs/bin:$$PATH" NO_MKDOCS_2_WARNING=1; \
	mike deploy $(PUSH) --update-aliases $(DOCS_VERSION) $(if $(filter main,$(DOCS_VERSION)),,latest); \
	if mike list latest > /dev/null 2>&1; then first=latest; else first=main; fi; \
	mike set-default $(PUSH) $$first

build/docs/.ready: requirements-docs.txt
	test -x build/docs/bin/python || $(PYTHON) -m venv build/docs
	build/docs/bin/python -m pip install --quiet --no-compile -r requirements-docs.txt
	touch $@

# For every GPU: machine code of all architectures that setup.py knows. auditwheel names the oldest
# system that it runs on; torch brings its own libraries.
wheel: export MOELORA_CUDA_ARCH ?= $(RELEASE_ARCHS)
wheel: $(VENV)/.ready
	rm -rf build/wheel dist/moelora-*_$$(uname -m).whl
	$(PY) -m pip wheel --no-deps --no-build-isolation -w build/wheel .
	$(AUDIT) -w dist build/wheel/*.whl

check-wheel: wheel
	$(PY) tests/project/check_wheel.py $$(ls -t dist/*.whl | head -n 1) $(CHECK_ARGS)

sdist: $(VENV)/.ready
	$(PY) setup.py -q sdist

# The files of a release: a source distribution, and of it wheels for this machine, one with CUDA kernels
# where there is nvcc, and one without, of version X+cpu. The address stands for the one of the
# repository where no remote names it.
RELEASE := build/release
AUDIT = PATH="$(VENV)/bin:$$PATH" $(PY) -m auditwheel repair --exclude 'libtorch*.so'
WHEEL = $(PY) -m pip wheel --quiet --no-deps --no-build-isolation -w $(RELEASE)/raw
TOOLKIT = $(PY) -c 'import sys; sys.path.append("csrc"); import compiling as c; cc, why = c.cuda_compiler(); \
  print(*c.nvcc_release(cc), sep=".") if cc else sys.exit(f"no wheel with CUDA: {why}")'
.PHONY: release-wheels release-notes release-files release-dry-run check-hub hub
release-wheels: export MOELORA_CUDA_ARCH ?= $(RELEASE_ARCHS)
release-wheels release-notes: export MOELORA_REPOSITORY ?= $(shell git remote get-url origin 2> /dev/null | \
  grep -Eq '^(https?|ssh)://|^\w+@' || echo https://example.invalid/moelora)
release-wheels: $(VENV)/.ready
	rm -rf $(RELEASE)
	$(PY) setup.py -q sdist -d $(RELEASE)/dist
	! $(TOOLKIT) || $(WHEEL) $(RELEASE)/dist/*.tar.gz
	MOELORA_CUDA=0 $(WHEEL) $(RELEASE)/dist/*.tar.gz -C--global-option=egg_info -C--global-option=--tag-build=+cpu
	$(AUDIT) -w $(RELEASE)/dist $(RELEASE)/raw/*.whl

# What a release has besides, of the wheels in build/release/dist: checks, a package index in files, bills of
# materials, the tree of the Hub, notes and checksums. RELEASE_CUDA is
# the version of the toolkit that the wheels are built with.
RELEASE_CUDA ?= $(shell $(TOOLKIT) 2> /dev/null)
HUB = $(PY) release/hub.py $(if $(RELEASE_CUDA),--cuda $(RELEASE_CUDA))
release-files: $(VENV)/.ready release-notes
	rm -rf $(RELEASE)/hub $(RELEASE)/index $(RELEASE)/dist/SHA256SUMS
	$(PY) release/check.py $(RELEASE)/dist $(if $(TAG),--tag $(TAG))
	$(PY) release/index.py $(RELEASE)/dist --out $(RELEASE)/index
	$(PY) release/sbom.py $(RELEASE)/dist --out $(RELEASE)/sbom $(if $(RELEASE_CUDA),--cuda $(RELEASE_CUDA))
	$(HUB) $(RELEASE)/hub $(RELEASE)/dist/*.whl
	tar -czf $(RELEASE)/hub.tar.gz -C $(RELEASE)/hub .
	cd $(RELEASE)/dist && sha256sum *.whl *.tar.gz > SHA256SUMS

# The newest section of the changelog, with links that lead to the tag.
release-notes:
	mkdir -p $(RELEASE)
	awk '/^## /{n++; next} n == 1' CHANGELOG.md | \
	  sed 's#](docs/#]($(MOELORA_REPOSITORY)/blob/$(or $(TAG),main)/docs/#g' > $(RELEASE)/notes.md

# Hugging Face's `kernels` loads the tree of the Hub, and another version of it, beside this moelora.
check-hub: build
	rm -rf $(RELEASE)/hub2
	$(HUB) $(RELEASE)/hub2 $(RELEASE)/dist/*.whl --version 2
	HF_HUB_OFFLINE=1 $(PY) tests/project/check_hub.py $(RELEASE)/hub $(RELEASE)/hub2

hub: release-wheels
	$(HUB) $(RELEASE)/hub $(RELEASE)/dist/*.whl
	$(MAKE) --no-print-directory check-hub

# All of a release but what needs an account; fresh environments of every Python here install and run the
# wheels by their name.
release-dry-run: release-wheels
	$(MAKE) --no-print-directory release-files
	$(MAKE) --no-print-directory check-hub
	$(PY) tests/project/check_wheel.py $(RELEASE)/dist/*.whl --index $(RELEASE)/index $(CHECK_ARGS)

# The commit and the tag of a release, after its dry run: make release VERSION=0.1.0. Pushing publishes.
.PHONY: release
release: release-dry-run
	$(PY) release/prepare.py $(VERSION)

clean:
	rm -rf build dist *.egg-info moelora/_C.abi3.so
