# make help lists the targets.
# Each target makes its own .venv when there is none, or when pyproject.toml changed.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
export OPENBLAS_NUM_THREADS ?= 1

.PHONY: help demo test integration check stress stress-long fuzzers bench gpu docs man links wheels install uninstall abi clean
.DEFAULT_GOAL := test

help: ## this list
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' Makefile | expand -t 14

demo: $(VENV)/demo ## see it work: a camera and a sound demo, pictures in examples/out
	$(BIN)/burst demo camera --out examples/out
	$(BIN)/burst demo audio --out examples/out

# ONLY: more words for pytest, such as ONLY="--last-failed -n 0".
ONLY ?=
# tests/hung_tests.py ends a test that hangs, with its children. Python keeps what it compiles, also where the environment forbids it: each process compiles all tests otherwise.
RUN_TESTS := PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -o faulthandler_exit_on_timeout=false --dist loadfile --no-loadscope-reorder --max-worker-restart 0

# Three workers for two cores: a test waits for a process about a third of its time.
test: $(VENV)/test ## what has to be true of every change, minutes
	$(RUN_TESTS) -n 3 -m "not (stress or integration or sources)" $(ONLY)

# What takes seconds each, or needs more: the core in C raced, killed and model-checked; kills at random moments; attacks, fairness and
# leaks over many rounds; drivers in C, among them examples/device-c on XNNPACK, built, held to the conformance tests and killed; every
# broken device; every program in the documentation; the wheels; Ray on four nodes; kserve's clients; a GPU's provider on SwiftShader. A
# tool that is missing is a failure.
integration: $(VENV)/integration $(VENV)/kserve/installed $(VENV)/swiftshader/installed ## what takes longer, or needs tools that not every machine has
	BURST_INTEGRATION=1 $(RUN_TESTS) -n 2 -m "integration and not stress" $(ONLY)

# C that clang-format writes; comments are wrapped by hand.
FORMATTED = $(wildcard $(foreach folder,fmq fmq/python libfmq burst libburst oip,csrc/$(folder)/*.[ch] csrc/$(folder)/*.hpp csrc/$(folder)/*.cc))

check: $(VENV)/check $(VENV)/test ## linters, types, and tests that read the sources
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/clang-format --dry-run -Werror $(FORMATTED)
	$(BIN)/mypy
	$(BIN)/python -m mypy.stubtest fmq._core fmq._hot burst._core
	$(BIN)/lint-imports
	$(RUN_TESTS) -n 2 -m "sources and not integration"
	$(BIN)/check-jsonschema --builtin-schema vendor.github-workflows .github/workflows/*.yml
	$(BIN)/check-jsonschema --builtin-schema vendor.github-issue-forms .github/ISSUE_TEMPLATE/[!c]*.yml
	$(BIN)/check-jsonschema --builtin-schema vendor.citation-file-format CITATION.cff
	$(BIN)/check-jsonschema --builtin-schema vendor.compose-spec compose.yaml
	$(BIN)/check-jsonschema --schemafile packaging/home-assistant/config.schema.json packaging/home-assistant/wake_words/config.yaml
	$(BIN)/zizmor --offline --quiet --config .github/zizmor.yml .github/workflows

# A twentieth of every long test, sized for two hours on two cores; both parts end with what was done, the second one with the table of attacks, too.
# BURST_STRESS=1 is the full length.
stress: export OPENBLAS_NUM_THREADS ?= 1
# Attacks and the soak measure honest accounts, and the demo's page shows how busy the processors are: these run alone, behind the others, and
# whatever came of those.
ALONE := tests/hostile/test_attacks.py tests/hostile/test_soak.py tests/driver/demos/test_web_page.py
STRESS := -o faulthandler_timeout=3600 -m "stress or attacks"
stress: $(VENV)/test fuzzers ## a twentieth of every long test, and the soak: two hours
	BURST_STRESS=$${BURST_STRESS:-0.05} $(RUN_TESTS) --dist load --maxschedchunk 1 -n 2 $(STRESS) $(ALONE:%=--ignore %); others=$$?; \
	BURST_STRESS=$${BURST_STRESS:-0.1} $(BIN)/python -m pytest -s $(STRESS) $(ALONE) && exit $$others

# Sample after sample until the totals are reached, over as many runs as it takes: tests/stress-ledger.json keeps what was done.
stress-long: $(VENV)/test fuzzers ## long tests until their totals are reached, over several runs
	$(BIN)/python tests/stress.py

fuzzers: $(VENV)/test
	@$(MAKE) --no-print-directory $(VENV)/fuzz || echo "make: no atheris for this Python; fuzzing that needs it is skipped"

# Goes on where it was stopped; BENCH="--budget 10" and other options: `bench/run.py --help`.
bench: $(VENV)/bench ## measure what the documentation says
	$(BIN)/python bench/run.py $(BENCH)

# What only a GPU can show; fails without one (GPU=--allow-none: says so and goes on). On a machine without a network, WHEELS is a folder
# with the wheels that it lacks (docs/howto/gpu.md lists them); what the machine's own Python has is used.
WHEELS ?=
GPU ?=
gpu: INSTALL := $(BIN)/python -m pip install --quiet $(if $(WHEELS),--no-index --find-links $(WHEELS))
gpu: ## what only a GPU can show; without one, that the checks run
	@test -x $(BIN)/python || $(PYTHON) -m venv $(if $(WHEELS),--system-site-packages) $(VENV)
	$(INSTALL) 'scikit-build-core>=1.0' 'cffi>=2.1'
	$(INSTALL) --no-build-isolation --editable '.[gpu]'
	@echo '$(CURDIR)/tests/devices' > "$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/burst_test_devices.pth"
	@test ! -e /dev/nvidiactl || $(INSTALL) 'onnxruntime-gpu>=1.24' || echo "make: without onnxruntime-gpu, what needs it does not run"
	@$(INSTALL) 'onnxruntime-ep-webgpu>=0.4' || echo "make: without onnxruntime-ep-webgpu, the check webgpu does not run"
	$(BIN)/python bench/gpu.py $(if $(wildcard /dev/nvidiactl /dev/nvhost-gpu /dev/nvgpu /dev/dxg),,--stand-ins) $(GPU)

# VERSIONS: folders beside the built one, which each page then links to: "stable latest" on a server that has both.
VERSIONS ?=
docs: $(VENV)/docs ## the site, in site/
	BURST_DOCS_VERSIONS='$(VERSIONS)' $(BIN)/python -m sphinx --fail-on-warning --keep-going --quiet -c docs -d build/doctrees . site
	@echo "open site/index.html"

# Manual pages of the command and its sub-commands, in build/man: MANPATH=build/man: man burst-run.
man: $(VENV)/docs ## manual pages of the command, in build/man
	$(BIN)/python docs/man_pages.py build/man/man1

# Every link to another site is tried; those inside are errors of `make docs`.
links: $(VENV)/docs ## try each link to another site
	$(BIN)/python -m sphinx -b linkcheck --quiet -c docs -d build/doctrees . build/links

# An sdist and a wheel for each processor, in dist/: no Docker, no compiler of the system.
wheels: $(VENV)/wheels ## an sdist and wheels, in dist/
	$(BIN)/python csrc/wheels.py

# libburst and libfmq, each shared and static, with headers for C and C++, and what pkg-config and CMake find them by. A client in C
# needs no Python, but for starting a device. LIBRARIES=libfmq: that one alone.
PREFIX ?= /usr/local
LIBRARIES ?= libburst libfmq
LIBRARIES_BUILD ?= $(CURDIR)/build
install: $(addprefix install-,$(LIBRARIES)) ## the libraries in C, below PREFIX=/usr/local
install-%:
	@$(MAKE) --no-print-directory --directory csrc/$* install PREFIX='$(PREFIX)' BUILD='$(LIBRARIES_BUILD)/$*'

# Removes what `make install` with the same PREFIX has written.
uninstall: $(addprefix uninstall-,$(LIBRARIES)) ## remove what install has written
uninstall-%:
	$(MAKE) --directory csrc/$* uninstall PREFIX='$(PREFIX)'

# What a compiled program relies on, as text, on x86-64 (Debian: apt install abigail-tools): after a change that is meant.
abi: $(addprefix abi-,$(LIBRARIES)) ## note what compiled programs rely on
abi-%:
	$(MAKE) --directory csrc/$* abi BUILD='$(LIBRARIES_BUILD)/$*'

# Tests and benches connect to devices that do odd things on purpose. Device processes ignore PYTHONPATH, so they are installed.
$(VENV)/test $(VENV)/bench $(VENV)/integration: DEVICES := --editable tests/devices
$(VENV)/test $(VENV)/bench $(VENV)/integration: tests/devices/pyproject.toml

# One stamp per set of extras. The sources of the extension are listed so that editing C rebuilds it.
CORE := $(wildcard csrc/*/*.c csrc/*/*.h csrc/CMakeLists.txt)
$(VENV)/%: pyproject.toml $(CORE) | $(BIN)/python
	$(BIN)/python -m pip install --quiet --editable '.[$*]' $(DEVICES)
	@touch $@

# kserve's clients want other versions of packages than `burst` does, so they have a place of their own.
$(VENV)/kserve/installed: | $(BIN)/python
	$(BIN)/python -m venv $(VENV)/kserve
	$(VENV)/kserve/bin/python -m pip install --quiet 'kserve>=0.19'
	@touch $@

# A GPU in software, for the provider webgpu: three files of Debian's package of a browser's, which is not installed (32 MB).
$(VENV)/swiftshader/installed: | $(BIN)/python
	rm -rf $(VENV)/swiftshader && mkdir -p $(VENV)/swiftshader
	cd $(VENV)/swiftshader && { apt-get -qq download chromium-common || { apt-get -qq update && apt-get -qq download chromium-common; }; }
	cd $(VENV)/swiftshader && dpkg-deb --fsys-tarfile chromium-common_*.deb | tar -x ./usr/lib/chromium/libvk_swiftshader.so \
		./usr/lib/chromium/vk_swiftshader_icd.json && rm chromium-common_*.deb
	@touch $@

$(BIN)/python:
	@command -v $(PYTHON) >/dev/null || { echo "make: '$(PYTHON)' is missing; install Python >= 3.11 (Debian: apt install python3 python3-venv)"; exit 1; }
	@command -v cc >/dev/null || { echo "make: no C compiler 'cc'; install one (Debian: apt install gcc libc6-dev)"; exit 1; }
	@test -e "$$($(PYTHON) -c 'import sysconfig; print(sysconfig.get_path("include"))')/Python.h" || { \
		echo "make: no Python.h for '$(PYTHON)'; install Python's headers (Debian: apt install python3-dev)"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip

clean: ## remove .venv and all that was built
	rm -rf $(VENV) build dist site examples/out bench/out
