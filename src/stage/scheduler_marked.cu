// SPDX-License-Identifier: MIT
// The scheduler that takes marked briefs as well (stage/marked.h): the same source, another module.
#define STAGE_WITH_MARKED 1
#include "stage/scheduler.cu"
