/* SPDX-License-Identifier: MIT */
/*
 * Part of libxpool.so only. Distributions compile their archives for programs, whose code may reach
 * the C library's `stdin` and `stderr` in place; a shared library's may not. So the library has its
 * own pair of these pointers, for nobody else to see, to the same streams.
 */
#include <stdio.h>

#define HIDDEN __attribute__((visibility("hidden")))

/* glibc's streams themselves; the pointers are all that programs normally see of them. */
extern char _IO_2_1_stdin_[], _IO_2_1_stdout_[], _IO_2_1_stderr_[];

HIDDEN FILE *stdin = (FILE *)(void *)_IO_2_1_stdin_;
HIDDEN FILE *stdout = (FILE *)(void *)_IO_2_1_stdout_;
HIDDEN FILE *stderr = (FILE *)(void *)_IO_2_1_stderr_;
