#!/bin/sh
# SPDX-License-Identifier: MIT
# ThreadSanitizer over Transport and Fabric: the program must be clean as it is, and the sanitizer must
# find the release store that XPOOL_WEAKEN_RELEASE weakens. Exits 0 only if both hold.
set -u
root=$(cd "$(dirname "$0")/../.." && pwd)
work=$(mktemp -d) || exit 1
trap 'rm -rf "$work"' EXIT
compiler=${CC:-cc}
sources="$root/tests/tsan/race_fabric.c $root/src/base/status.c $root/src/base/memfd.c
         $root/src/base/pool.c $root/src/base/cpus.c $root/src/base/dtype.c
         $root/src/observe/*.c $root/src/fabric/*.c"
# The processor's Transport; that of GPUs has its own test of the protocol (unit/transport).
for file in "$root"/src/transport/*.c; do
    case "${file##*/}" in cuda_*) ;; *) sources="$sources $file" ;; esac
done

build() { # name flags...
    name=$1
    shift
    # shellcheck disable=SC2086
    "$compiler" -std=gnu17 -D_GNU_SOURCE -O1 -g -fsanitize=thread -fno-strict-aliasing \
        -I"$root/src" "$@" $sources -o "$work/$name" -lpthread -lm
}

# The sanitizer needs its address ranges free; some kernels randomise too widely for it.
quiet=""
if command -v setarch >/dev/null 2>&1 && setarch "$(uname -m)" -R true 2>/dev/null; then
    quiet="setarch $(uname -m) -R"
fi
run() {
    TSAN_OPTIONS="exitcode=66 halt_on_error=1 second_deadlock_stack=1" \
        $quiet timeout 240 "$work/$1" >"$work/$1.log" 2>&1
}

build probe -DXPOOL_WEAKEN_RELEASE || { echo "tsan: cannot build the planted program"; exit 1; }
build clean || { echo "tsan: cannot build"; exit 1; }

run clean
code=$?
if [ $code -ne 0 ]; then
    tail -60 "$work/clean.log"
    echo "tsan: the program as it is ended with $code"
    exit 1
fi
# The mistake shows when a reader meets the store before any other order reaches it: not in each run.
for attempt in 1 2 3 4 5; do
    run probe
    code=$?
    if [ $code -eq 66 ] && grep -q "WARNING: ThreadSanitizer: data race" "$work/probe.log"; then
        echo "tsan: clean, and the planted relaxed store was found (attempt $attempt)"
        exit 0
    fi
done
echo "tsan: the planted relaxed store was not found (last exit $code)"
exit 1
