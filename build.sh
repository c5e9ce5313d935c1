#!/usr/bin/env bash
# The one entry point. Needs Python 3.11 or later and a C++ compiler; everything else goes into .venv.
set -euo pipefail

usage() {
  cat <<'END'
usage: ./build.sh [command] [arguments]

  build     (default) set up .venv, compile into build/, install .venv/bin/twinop
  demo      build, export custom_relu.onnx, run it and compare with torch
  test      build, run the tests; arguments go to pytest, --all adds the slow tests
  bench     build, run a performance report: ./build.sh bench --ops gelu --quick; bench --help lists the others
  format    format and fix the sources (ruff, clang-format)
  clean     remove build/, build-*/, .venv/ and the tools' caches

Environment:
  TWINOP_DEVICE       cpu or cuda: which ONNX Runtime goes into .venv (default: cuda where nvidia-smi lists a GPU)
  TWINOP_PYTHON       the Python that .venv is made from (default: python3)
  TWINOP_TORCH_INDEX  an extra package index for torch; for torch's CPU build (much smaller):
                      https://download.pytorch.org/whl/cpu
  TWINOP_CUDA_ARCHS   native (default), all, or a list such as 80,90
  ORT_ROOT            an ONNX Runtime release, unpacked or .tgz, to take the headers from; also TWINOP_CACHE,
                      TWINOP_ORT_URL, TWINOP_ORT_VERSION, TWINOP_ORT_SHA256: see cmake/OrtHeaders.cmake
END
}

say() { printf 'twinop: %s\n' "$*" >&2; }
fail() { say "error: $*"; exit 1; }

for name in ORT_ROOT TWINOP_CACHE; do # relative to where the user stands, before leaving it
  if [[ -n ${!name:-} && ${!name} != [/~]* ]]; then export "$name=$PWD/${!name}"; fi
done
cd "$(dirname "${BASH_SOURCE[0]}")"
root=$PWD
venv=$root/.venv
python=$(command -v "${TWINOP_PYTHON:-python3}" || true) # before .venv's own comes first
export PATH="$venv/bin:$PATH" # cmake and ninja come from there
export PIP_DISABLE_PIP_VERSION_CHECK=1

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

# .venv with the pinned requirements. The stamp names what it was made from: an equal one costs no network.
setup() {
  local device stamp=$venv/twinop-stamp made_for want rest
  device=$(device)
  check_prerequisites
  made_for="$root $device $("$python" -V) "
  if [[ -z ${TWINOP_TORCH_INDEX:-} && -f $stamp && $(<"$stamp") == "$made_for"* ]]; then
    rest=$(<"$stamp")
    rest=${rest#"$made_for"}
    TWINOP_TORCH_INDEX=${rest%% *} # which .venv was made with
  fi
  want="$made_for${TWINOP_TORCH_INDEX:-} $(cat requirements/*.txt | sha256sum)"
  if [[ -f $stamp && $(<"$stamp") == "$want" ]]; then return; fi
  say "setting up .venv for $device (the first time takes minutes)"
  if [[ $device == cpu && -z ${TWINOP_TORCH_INDEX:-} ]]; then
    say "without a GPU, TWINOP_TORCH_INDEX=https://download.pytorch.org/whl/cpu takes torch's CPU build: much smaller"
  fi
  if [[ ! -f $stamp || $(<"$stamp") != "$made_for"* ]]; then
    rm -rf "$venv" # moved, another Python or the other ONNX Runtime, which shares its files
    "$python" -m venv "$venv" ||
      fail "$python cannot make a virtual environment (Debian, Ubuntu: install python3-venv)."
  fi
  rm -f "$stamp"
  "$venv/bin/python" -m pip install --quiet ${TWINOP_TORCH_INDEX:+--extra-index-url "$TWINOP_TORCH_INDEX"} \
    -r requirements/base.txt -r "requirements/$device.txt" -r requirements/dev.txt ||
    fail "the packages in requirements/ could not be installed; see pip's message above."
  echo "$want" >"$stamp"
}

build() {
  setup
  cmake --preset default
  cmake --build --preset default
  # The editable install copies the libraries from build/ and knows the modules by name.
  local stamp=$venv/twinop-installed want
  want=$({ cat pyproject.toml CMakeLists.txt build/*.so && find -L twinop -name '*.py' | sort; } | sha256sum)
  if [[ -f $stamp && $(<"$stamp") == "$want" ]]; then return; fi
  say "installing into .venv (editable)"
  "$venv/bin/python" -m pip install --quiet --no-index --no-build-isolation --no-deps --editable .
  echo "$want" >"$stamp"
}

format() {
  setup
  ruff format
  find kernels ort_customop torch_op tests \( -name '*.h' -o -name '*.cpp' -o -name '*.cu' -o -name '*.cuh' \) \
    -exec clang-format -i {} +
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
  if "$venv/bin/python" -m pip install --quiet ${TWINOP_TORCH_INDEX:+--extra-index-url "$TWINOP_TORCH_INDEX"} \
    --no-deps --target "$folder" -r requirements/architectures.txt; then
    echo "$want" >"$folder/stamp"
  else
    say "timm and torchvision could not be installed: the tests of their models will be skipped"
  fi
}

run_tests() {
  local arguments=()
  for argument in "$@"; do # `-m ''` takes back pyproject.toml's -m 'not slow'
    if [[ $argument == --all ]]; then arguments+=(-m ""); image_models; else arguments+=("$argument"); fi
  done
  python tests/helpers/ort_versions.py # the ONNX Runtime releases that one .so file must serve
  python -m pytest "${arguments[@]}"
}

command=${1:-build}
shift || true
case $command in
  build)
    build
    say "done; .venv/bin/twinop export writes a first model, .venv/bin/twinop --help lists the commands"
    ;;
  demo) build; python export/to_onnx.py; python deploy/run_onnx.py custom_relu.onnx ;;
  test) build; run_tests "$@" ;;
  bench) build; python -m twinop.bench "$@" ;;
  format) format ;;
  clean) rm -rf build build-* .venv dist .mypy_cache .pytest_cache .ruff_cache .hypothesis ;;
  -h | --help | help) usage ;;
  *) usage >&2; fail "unknown command: $command" ;;
esac
