#!/bin/sh
# SPDX-License-Identifier: MIT
# Checks the protocol models exhaustively (assertions, invalid end states, then non-progress cycles),
# and that Spin finds each planted mistake. Exits 77 where Spin is not installed.
set -u
here=$(cd "$(dirname "$0")" && pwd)
command -v spin >/dev/null 2>&1 || { echo "spin is not installed"; exit 77; }
work=$(mktemp -d) || exit 1
trap 'rm -rf "$work"' EXIT
cp "$here"/*.pml "$work"
cd "$work" || exit 1
compiler=${CC:-cc}

check() { # model, pan compile flags, pan run flags, spin flags...
    model=$1 compile=$2 flags=$3
    shift 3
    rm -f pan* ./*.trail
    spin -a "$@" "$model.pml" >spin.log 2>&1 || { cat spin.log; exit 1; }
    # shellcheck disable=SC2086
    "$compiler" -O1 -w -o pan $compile pan.c || exit 1
    # shellcheck disable=SC2086
    ./pan -m1000000 $flags >pan.log 2>&1
    if grep -q "max search depth too small\|out of memory\|Search not completed" pan.log &&
        ! grep -q "errors: [1-9]" pan.log; then
        echo "$model $*: the search was not complete"
        cat pan.log
        exit 1
    fi
    grep -q "errors: 0" pan.log
}

states() {
    sed -n 's/^ *\([0-9.e+]*\) states, stored.*/\1/p' pan.log | head -1
}

clean() {
    for mode in safety progress; do
        if [ $mode = safety ]; then compile=-DSAFETY flags=""; else compile=-DNP flags=-l; fi
        if ! check "$1" "$compile" "$flags"; then
            cat pan.log
            echo "$1: $mode does not hold"
            exit 1
        fi
        echo "$1: $mode holds, $(states) states"
    done
}

planted() {
    if check "$1" -DSAFETY "" "-D$2"; then
        echo "$1: $2 was not found"
        exit 1
    fi
    grep -q "errors: [1-9]" pan.log || { cat pan.log; exit 1; }
    echo "$1: $2 found"
}

clean mailbox
for bug in BUG_PUBLISH_FIRST BUG_OBSERVE_LATE BUG_SLEEPERS_FIRST BUG_UNDECLARED_SLEEPER \
    BUG_FUTEX_WITHOUT_COMPARE BUG_SILENT_CLOSE; do
    planted mailbox $bug
done
clean reattach
for bug in BUG_TWO_AGENTS BUG_COUNT_FROM_ZERO BUG_SLEEP_FIRST BUG_NO_TICK; do
    planted reattach $bug
done
clean lane
for bug in BUG_RELEASE_WITHOUT_ACK BUG_ABANDON_WITHOUT_INPUT BUG_ABANDON_IS_IDLE \
    BUG_COMMIT_BEFORE_PARTIALS; do
    planted lane $bug
done
clean slot
for bug in BUG_NO_TURN BUG_UNMAP_AT_TIMEOUT BUG_KEEP_AFTER_DETACH; do
    planted slot $bug
done
clean stage
for bug in BUG_LINE_FIRST BUG_READY_FIRST BUG_ANY_WORD BUG_DETACH_RUNNING BUG_ATTACH_EARLY \
    BUG_KEEP_WORDS BUG_ONE_RANK; do
    planted stage $bug
done
clean generations
for bug in BUG_CLEAR_STAGE BUG_CLEAR_PARTS BUG_COUNT_FROM_ZERO BUG_FORMER_LIVES BUG_NO_PAUSE \
    BUG_ANSWER_FIRST; do
    planted generations $bug
done
clean ranks
for bug in BUG_NO_LOOK BUG_SERVE_FIRST BUG_WORD_FIRST BUG_FORMER_LIVES BUG_FORMER_LINES; do
    planted ranks $bug
done
clean lease
for bug in BUG_LEAVE_ALONE BUG_OFFER_FIRST BUG_DO_NOT_WAIT BUG_STORE BUG_BESIDE; do
    planted lease $bug
done
clean items
for bug in BUG_DOWN_FIRST BUG_RESET_EARLY BUG_ACTED_STAYS BUG_DO_NOT_MEET; do
    planted items $bug
done
clean cuts
for bug in BUG_ANY_COMMAND BUG_NO_COUNT BUG_DEAF BUG_LEAVE_ALONE BUG_EARLY; do
    planted cuts $bug
done
echo "verify: all models hold and every planted mistake was found"
