#!/bin/sh
# SPDX-License-Identifier: MIT
# ThreadSanitizer over Transport and Fabric, over the stages of the GPUs' data plane, and over the KV
# control channel: each program must be clean as it is, and the sanitizer must find the release store
# that XPOOL_WEAKEN_RELEASE weakens. Exits 0 only if all of it holds.
set -u
root=$(cd "$(dirname "$0")/../.." && pwd)
work=$(mktemp -d) || exit 1
trap 'rm -rf "$work"' EXIT
compiler=${CC:-cc}
fabric="$root/tests/tsan/race_fabric.c $root/src/base/status.c $root/src/base/memfd.c
         $root/src/base/pool.c $root/src/base/cpus.c $root/src/base/dtype.c
         $root/src/observe/*.c $root/src/fabric/*.c"
# The processor's Transport; that of GPUs has its own test of the protocol (unit/transport).
for file in "$root"/src/transport/*.c; do
    case "${file##*/}" in cuda_*) ;; *) fabric="$fabric $file" ;; esac
done
stage="-I$root/tests/unit/stage $root/tests/tsan/race_stage.c"
kv="$root/tests/tsan/race_kv.c"
for part in kv/channel kv/rank kv/market kv/policy base/status base/memfd base/failpoint base/log; do
    kv="$kv $root/src/$part.c"
done

build() { # name, sources, flags...
    name=$1 sources=$2
    shift 2
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

check() { # name, sources
    build "$1-probe" "$2" -DXPOOL_WEAKEN_RELEASE &&
        build "$1" "$2" || { echo "tsan: cannot build $1"; exit 1; }
    run "$1"
    code=$?
    if [ $code -ne 0 ]; then
        tail -60 "$work/$1.log"
        echo "tsan: $1 as it is ended with $code"
        exit 1
    fi
    # The mistake shows when a reader meets the store before any other order reaches it: not in each run.
    for attempt in 1 2 3 4 5; do
        run "$1-probe"
        code=$?
        if [ $code -eq 66 ] && grep -q "WARNING: ThreadSanitizer: data race" "$work/$1-probe.log"; then
            echo "tsan: $1 is clean, and the planted relaxed store was found (attempt $attempt)"
            return
        fi
    done
    echo "tsan: the planted relaxed store of $1 was not found (last exit $code)"
    exit 1
}

check fabric "$fabric"
check stage "$stage"
check kv "$kv"
