#!/bin/sh
# SPDX-License-Identifier: MIT
# Builds llama.cpp (by way of llama-cpp-python) for the comparison of bench_serving.py --llama, into
# .xpool-cache/venv-llama. Tens of minutes on two cores; only the benchmark needs it; built once.
. "$(dirname "$0")/../scripts/lib.sh"

version=0.3.36
place="$xp_cache/venvs/llama-$version"
link="$xp_cache/venv-llama"
[ ! -e "$place/complete" ] || exit 0
xp_need_packages "llama.cpp" 400 gcc g++ cmake ninja-build python3 python3-venv
python=$(xp_python) || xp_die "Python 3.11 or later is needed (set XPOOL_PYTHON to one)"
xp_lock venv-llama
[ ! -e "$place/complete" ] || exit 0
rm -rf "$place"
xp_need_disk 1500 "$xp_cache" "llama.cpp"
trap '[ -e "$place/complete" ] || rm -rf "$place"' EXIT
trap 'exit 130' INT
trap 'exit 143' TERM
mkdir -p "$place/tmp"
"$python" -m venv "$place"
xp_say "building llama.cpp; this takes long (tens of minutes on two cores)"
CMAKE_BUILD_PARALLEL_LEVEL=$(xp_jobs) TMPDIR="$place/tmp" "$place/bin/python" -m pip install \
    --disable-pip-version-check --no-input --no-binary llama-cpp-python "llama-cpp-python==$version" 9>&-
rm -rf "$place/tmp"
"$place/bin/python" -c 'import llama_cpp; print("llama-cpp-python", llama_cpp.__version__)'
touch "$place/complete"
ln -sfn "venvs/llama-$version" "$link"
