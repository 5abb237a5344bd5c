/* SPDX-License-Identifier: MIT */
/* Files that are generated from the registry, so that they cannot drift from it. */
#ifndef XPOOL_CONFIG_DOCS_H
#define XPOOL_CONFIG_DOCS_H

#include "base/buf.h"

typedef struct config_document {
    const char *path; /* from the project's root */
    xp_status_t (*write)(xp_buf_t *text_out);
} config_document_t;

/* docs/configuration.md, configs/xpool.example.toml, .env.example; ends with a NULL path. */
extern const config_document_t config_documents[];
#endif
