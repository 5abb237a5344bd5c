/* SPDX-License-Identifier: MIT */
/*
 * The digest by which processes prove that they hold the same configuration: SHA-256 over one line
 * a setting, in the registry's order. Values worked out from one process's surroundings (free
 * memory, usable cores, current folder) enter as "auto": they may differ between processes that
 * were started from the same configuration. Logging is left out.
 */
#include "config/resolve.h"

#include <openssl/evp.h>
#include <string.h>

#define DIGEST_TEXT_MAX (64u * 1024 * 1024)

xp_status_t config_digest_text(const config_t *config, xp_buf_t *text_out)
{
    XP_TRY(xp_buf_append_text(text_out, "xpool configuration 1\n"));
    for (uint32_t i = 0; i < config_setting_count; i++) {
        const config_setting_t *setting = &config_settings[i];
        if (strncmp(setting->key, "logging.", 8) == 0 || setting->alias_of)
            continue;
        for (uint32_t item = 0; item < config_scope_items(config, setting->scope); item++) {
            char key[CONFIG_MAX_KEY];
            if (!config_setting_applies(config, setting, item))
                continue;
            XP_TRY(config_setting_item_key(config, setting, item, key, sizeof(key)));
            XP_TRY(xp_buf_printf(text_out, "%s = ", key));
            if (config_setting_slot(config, setting, item)->state == CONFIG_SLOT_DERIVED)
                XP_TRY(xp_buf_append_text(text_out, "auto"));
            else
                XP_TRY(config_setting_literal(setting, config_setting_base(config, setting, item),
                                              text_out));
            XP_TRY(xp_buf_append_text(text_out, "\n"));
        }
    }
    return XP_OK;
}

xp_status_t config_digest_compute(config_t *config)
{
    xp_status_t status;
    xp_buf_t text;
    unsigned char digest[EVP_MAX_MD_SIZE];
    xp_buf_init(&text, DIGEST_TEXT_MAX);
    XP_TRY_GOTO(status, done, config_digest_text(config, &text));
    if (EVP_Digest(text.data, text.length, digest, NULL, EVP_sha256(), NULL) != 1) {
        status = xp_fail(XP_NO_MEMORY, "libcrypto cannot compute SHA-256");
        goto done;
    }
    memcpy(config->digest, digest, sizeof(config->digest));
done:
    xp_buf_fini(&text);
    return status;
}
