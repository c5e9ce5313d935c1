#!/usr/bin/env bash
# The one entry point. Needs Python 3.11 or later and a C++ compiler; everything else goes into .venv.
set -euo pipefail

usage() {
  cat <<'END'
usage: ./build.sh [command] [arguments]

  build     (default) set up .venv, compile into build/, install .venv/bin/twinop
  demo      build the op relu alone, export custom_relu.onnx, run it and compare with torch
            --cpu behind build or demo leaves the CUDA kernels out; ./build.sh clean takes that back
  serve     build, add the packages of the service; arguments go to twinop serve
  test      build, run the tests in three processes; arguments go to pytest in their place (-n 0: in one process,
            -k relu: some tests), --all adds the slow tests
  bench     build, measure ops beside torch's and ONNX Runtime's: ./build.sh bench --ops gelu --quick
  check     check the sources without changing them (ruff, clang-format, mypy), and the links of docs/
  format    format and fix the sources (ruff, clang-format)
  setup     set up .venv with the packages of all commands, or of those named (base serve bench test lint wheel
            docs)
  wheel     build, write the wheel and the source archive to dist/, check them
  docs      build the pages of docs/ into build/site/, with every link checked
  clean     remove build/, build-*/, .venv/ and the tools' caches

Each command installs the packages that it needs (requirements/) where they are missing.

Environment:
  TWINOP_DEVICE       cpu or cuda: which ONNX Runtime goes into .venv (default: cuda where nvidia-smi lists a GPU)
  TWINOP_PYTHON       the Python that .venv is made from (default: python3)
  PIP_EXTRA_INDEX_URL pip's; https://download.pytorch.org/whl/cpu has torch's CPU build, which is much smaller
  TWINOP_CUDA_ARCHS   native (default: for this machine's GPUs; for compute capability 9.0 where there is none),
                      all, or a list such as 80,90: then the newest has PTX, which later GPUs can run, too
  ORT_ROOT            an ONNX Runtime release, unpacked or .tgz, to take the headers from; also TWINOP_CACHE and
                      TWINOP_ORT_URL: see cmake/OrtHeaders.cmake
END
}

say() { printf 'twinop: %s\n' "$*" >&2; }
fail() { say "error: $*"; exit 1; }

for name in ORT_ROOT TWINOP_CACHE; do # relative to where the user stands, before leaving it
  if [[ -n ${!name:-} && ${!name} != [/~]* ]]; then export "$name=$PWD/${!name}"; fi
done
caller=$PWD
cd "$(dirname "${BASH_SOURCE[0]}")"
root=$PWD
venv=$root/.venv
python=$(command -v "${TWINOP_PYTHON:-python3}" || true) # before .venv's own comes first
export PATH="$venv/bin:$PATH" # cmake and ninja come from there
export PIP_DISABLE_PIP_VERSION_CHECK=1
# Python's byte code is written where it is first needed, also where the environment says otherwise: of all packages it
# takes pip a minute.
export PIP_COMPILE=0 PYTHONDONTWRITEBYTECODE=''

everything=(base serve bench test lint wheel docs)
all_ops_take="about five minutes with nvcc on two cores, two with --cpu" # twinop/installation.py says it, too

device() {
  local device=${TWINOP_DEVICE:-}
  if [[ -z $device ]]; then
    if [[ $(nvidia-smi -L 2>/dev/null) == GPU* ]]; then device=cuda; else device=cpu; fi
  fi
  [[ $device == cpu || $device == cuda ]] || fail "TWINOP_DEVICE=$device: expected cpu or cuda"
  echo "$device"
}

check_prerequisites() {
  [[ -n $python ]] ||
    fail "no ${TWINOP_PYTHON:-python3} found. Install Python 3.11 or later, or set TWINOP_PYTHON to one."
  "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
    fail "$python is $("$python" -V 2>&1); twinop needs 3.11 or later. Set TWINOP_PYTHON to one."
  command -v "${CXX:-c++}" >/dev/null || command -v g++ >/dev/null || command -v clang++ >/dev/null ||
    fail "no C++ compiler found (${CXX:-c++}, g++, clang++). Install one (Debian, Ubuntu: g++), or set CXX."
}

# .venv with the pinned packages of each purpose, requirements/<purpose>.txt; `base` comes first. Files in .venv/twinop
# record what is installed: a purpose whose requirements have not changed costs no network.
setup() {
  local device made_for purpose file files stamps=$venv/twinop arguments=()
  local -A wanted=()
  device=$(device)
  check_prerequisites
  made_for="$root $device $("$python" -V)"
  # Moved, another Python, or the other ONNX Runtime, which shares its files: .venv is made again.
  if [[ ! -f $stamps/made_for || $(<"$stamps/made_for") != "$made_for" ]]; then rm -rf "$venv"; fi
  for purpose in "$@"; do
    files=("requirements/$purpose.txt")
    [[ -f ${files[0]} ]] || fail "no ${files[0]}: expected some of ${everything[*]}"
    if [[ $purpose == base ]]; then files+=(requirements/compile.txt "requirements/$device.txt"); fi
    wanted[$purpose]=$(cat requirements/constraints.txt "${files[@]}" | sha256sum)
    if [[ -f $stamps/$purpose && $(<"$stamps/$purpose") == "${wanted[$purpose]}" ]]; then
      unset "wanted[$purpose]"
    else
      for file in "${files[@]}"; do arguments+=(-r "$file"); done
    fi
  done
  if [[ ${#wanted[@]} == 0 ]]; then return; fi
  say "installing packages into .venv: $*"
  if [[ ! -d $venv ]]; then
    "$python" -m venv "$venv" ||
      fail "$python cannot make a virtual environment (Debian, Ubuntu: install python3-venv)."
    mkdir "$stamps"
    echo "$made_for" >"$stamps/made_for"
  fi
  for purpose in "${!wanted[@]}"; do rm -f "$stamps/$purpose"; done
  "$venv/bin/python" -m pip install --quiet "${arguments[@]}" ||
    fail "the packages in requirements/ could not be installed; see pip's message above."
  for purpose in "${!wanted[@]}"; do echo "${wanted[$purpose]}" >"$stamps/$purpose"; done
}

# Compiles with a build preset of CMakePresets.json.
build() {
  if [[ ! -e build/libcustom_ops.so ]]; then say "the first build of all ops takes $all_ops_take"; fi
  cmake --preset default "${cuda[@]}"
  cmake --build --preset "$1"
  install
}

# The editable install has the modules, which it knows by name, and `twinop`. The libraries stay in build/.
install() {
  local stamp=$venv/twinop/installed want
  want=$({ cat pyproject.toml && find -L twinop -name '*.py' | sort; } | sha256sum)
  if [[ -f $stamp && $(<"$stamp") == "$want" ]]; then return; fi
  "$venv/bin/python" -m pip install --quiet --no-index --no-build-isolation --no-deps \
    --config-settings=wheel.cmake=false --editable .
  echo "$want" >"$stamp"
}

# Builds relu's library while packages are installed; torch's adapter needs torch.
demo() {
  setup compile
  setup base &
  trap wait EXIT # also where compiling fails: nothing goes on installing
  TWINOP_TORCH_COMES=1 cmake --preset default "${cuda[@]}"
  cmake --build --preset default --target custom_relu
  wait $!
  cmake --build --preset demo
  install
}

# The wheel and the source archive, as an index takes them: for every Linux with glibc 2.34, checked.
wheel() {
  local unchecked=build/wheel
  rm -rf dist "$unchecked"
  python -m build --no-isolation --wheel --outdir "$unchecked"
  python -m build --no-isolation --sdist --outdir dist
  # libtwinop_torch.so takes libtorch from the torch of the process that loads it.
  auditwheel repair --plat "manylinux_2_34_$(uname -m)" --exclude libtorch.so --exclude libtorch_cpu.so \
    --wheel-dir dist "$unchecked"/*.whl
  check-wheel-contents dist/*.whl
  twine check --strict dist/*
  say "done: $(du -h dist/* | tr '\t\n' '  ')"
}

clang_format() {
  find kernels ort_customop torch_op tests examples \( -name '*.h' -o -name '*.cpp' -o -name '*.cu' -o -name '*.cuh' \) \
    -exec clang-format "$@" {} +
}

check() {
  ruff check
  ruff format --check
  clang_format --dry-run --Werror
  mypy
  site
}

site() { NO_MKDOCS_2_WARNING=1 mkdocs build --strict --quiet; }

format() {
  ruff format
  clang_format -i
  ruff check --fix # last: it fails for what it cannot mend
}

# timm and torchvision, in a folder that only tests/export/architectures looks into; it says why.
image_models() {
  local folder=$venv/architectures want
  want=$(sha256sum <requirements/architectures.txt)
  if [[ -f $folder/stamp && $(<"$folder/stamp") == "$want" ]]; then return; fi
  say "installing timm and torchvision into .venv/architectures"
  rm -rf "$folder"
  mkdir "$folder"
  if "$venv/bin/python" -m pip install --quiet --no-deps --target "$folder" -r requirements/architectures.txt; then
    echo "$want" >"$folder/stamp"
  else
    say "timm and torchvision could not be installed: the tests of their models will be skipped"
  fi
}

run_tests() {
  local arguments=() all=() argument
  if [[ -z ${1:-} || $* == --all ]]; then arguments=(-n 3 --dist worksteal); fi # some wait; a worker keeps to its files
  for argument in "$@"; do # `-m ''` takes back pyproject.toml's -m 'not slow'
    if [[ $argument == --all ]]; then arguments+=(-m "") all=(--all) && image_models; else arguments+=("$argument"); fi
  done
  python tests/helpers/ort_versions.py "${all[@]}" # the ONNX Runtime releases that one .so file must serve
  python -m pytest "${arguments[@]}"
}

command=${1:-build}
shift || true
cuda=() # what CMake is told of the CUDA kernels
if [[ ${1:-} == --cpu && ($command == build || $command == demo) ]]; then
  cuda=(-DTWINOP_WITH_CUDA=OFF)
  shift
fi
case $command in # these take no arguments
  build | demo | check | format | wheel | docs | clean)
    [[ $# == 0 ]] || { usage >&2; fail "$command: unknown argument: $1"; }
    ;;
esac
case $command in
  build)
    setup base
    build default
    say "done; .venv/bin/twinop export writes a first model, .venv/bin/twinop --help lists the commands"
    ;;
  demo)
    if [[ -e build/libcustom_ops.so ]]; then setup base && build default; else demo; fi # all ops: none may be an old one
    python export/to_onnx.py
    python deploy/run_onnx.py custom_relu.onnx
    [[ -e build/libcustom_ops.so ]] || say "done; this built relu alone. ./build.sh builds all ops: $all_ops_take"
    ;;
  serve)
    setup base serve
    build default
    if [[ $# -gt 0 ]]; then cd "$caller" && exec twinop serve "$@"; fi
    say "done; .venv/bin/twinop serve MODEL serves an .onnx file or a folder of models"
    ;;
  test)
    if [[ " $* " == *" --all "* ]]; then setup base serve bench test slow; else setup base serve bench test; fi
    build test
    run_tests "$@"
    ;;
  bench)
    setup base bench
    build default
    python -m twinop.bench "$@"
    ;;
  wheel) setup base wheel; wheel ;;
  docs) setup base docs; site ;;
  check) setup base serve bench test lint docs; check ;; # mypy reads the packages
  format) setup base lint; format ;;
  setup) if [[ $# -gt 0 ]]; then setup "$@"; else setup "${everything[@]}"; fi ;;
  clean) rm -rf build build-* .venv dist .mypy_cache .pytest_cache .ruff_cache .hypothesis ;;
  -h | --help | help) usage ;;
  *) usage >&2; fail "unknown command: $command" ;;
esac
