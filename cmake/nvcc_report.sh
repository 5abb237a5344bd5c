#!/bin/sh
# SPDX-License-Identifier: MIT
# usage: nvcc_report.sh REPORT NVCC ARGUMENT...
# Compiles; what ptxas says of each kernel's registers, spills and shared memory goes to REPORT, and to
# stderr only where compiling fails.
report=$1
shift
"$@" --resource-usage 2>"$report" && exit 0
code=$?
cat "$report" >&2
exit "$code"
