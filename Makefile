# Short commands. CMake does the work; CMakePresets.json defines the presets.

PRESET ?= release
CUDA ?= AUTO
CMAKE_ARGS ?=
ARGS ?=

folder = $(if $(filter release,$(PRESET)),build,build/$(PRESET))
bin = $(folder)/bin
# scripts/setup installs tools here if the system's packages are too old.
export PATH := $(CURDIR)/build/tools/bin:$(PATH)

cuda = $(if $(filter cuda asan tsan,$(PRESET)),,-DMICA_CUDA=$(CUDA))
compile = cmake --build $(folder) --target
# The sanitizers report errors in MPI's own library.
runs_ranks = $(if $(filter asan tsan,$(PRESET)),false,true)

.PHONY: help build train test bench clean setup configure

help:
	@echo 'make build   compile the library and the examples'
	@echo 'make train   train a small transformer on mica'"'"'s own sources and sample from it'
	@echo 'make test    compile and run the tests'
	@echo 'make bench   compile and run the benchmarks'
	@echo 'make clean   remove build/'
	@echo
	@echo 'On Debian and Ubuntu, each command installs missing packages. Variables:'
	@echo '  PRESET=release|debug|asan|tsan|cuda   what to build; release goes to build/, the others to build/PRESET/'
	@echo '  CUDA=AUTO|ON|OFF                      CUDA kernels; AUTO builds them for this machine'"'"'s GPU, if it has one'
	@echo '  ARGS="--steps 100 ..."                passed to the program'
	@echo '  CMAKE_ARGS="-DMICA_NATIVE=OFF"        passed to CMake'

setup:
	@scripts/setup

configure: setup
	@mkdir -p $(folder)
	@cmake --preset $(PRESET) $(cuda) $(CMAKE_ARGS) >$(folder)/configure.log 2>&1 || { cat $(folder)/configure.log; exit 1; }

build: configure
	@$(compile) mica train_transformer generate finetune

train: configure
	@$(compile) train_transformer generate
	@$(bin)/train_transformer $(ARGS)

test: configure
	@$(compile) mica_tests
	@scripts/run_tests $(bin)/mica_tests $(ARGS)
	@if grep -q 'over MPI 1' $(folder)/configure.log && $(runs_ranks); then \
	  $(compile) mica_rank_tests && timeout 300 scripts/ranks 4 $(bin)/mica_rank_tests $(ARGS); fi

bench: CMAKE_ARGS += -DMICA_BENCHMARKS=ON
bench: configure
	@cmake --build $(folder)
	@for program in $(bin)/bench_*; do \
	  if [ -x "$$program" ]; then echo "== $$program"; "$$program" $(ARGS) || exit 1; fi; done

clean:
	rm -rf build
