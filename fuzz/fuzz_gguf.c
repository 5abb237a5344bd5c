/* SPDX-License-Identifier: MIT */
/* Fuzz target: a GGUF front part, then every accessor, then the model spec made from it. */
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "model/spec_private.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void read_key(const gguf_file_t *file, const char *key)
{
    uint64_t word;
    double number;
    bool flag;
    const char *text;
    size_t length, count;
    volatile uint8_t sink = 0;
    (void)gguf_get_u64(file, key, &word);
    (void)gguf_get_f64(file, key, &number);
    (void)gguf_get_bool(file, key, &flag);
    if (gguf_get_string(file, key, &text, &length) == XP_OK && length)
        sink = (uint8_t)(sink + text[0] + text[length - 1]);
    if (gguf_array_count(file, key, &count) != XP_OK)
        return;
    for (size_t i = 0; i < count && i < 1000; i++) {
        (void)gguf_array_f64(file, key, i, &number);
        if (gguf_array_string(file, key, i, &text, &length) == XP_OK && length)
            sink = (uint8_t)(sink + text[0] + text[length - 1]);
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static model_spec_t spec;
    static const char *const keys[] = {"general.architecture",  "general.alignment",
                                       "tokenizer.ggml.tokens", "tokenizer.ggml.token_type",
                                       "tokenizer.ggml.merges", "tokenizer.ggml.scores",
                                       "llama.rope.freq_base",  "a"};
    gguf_file_t *file;
    /* The data part is imagined: a GiB, so that tensors of any believable size lie in it. */
    if (gguf_parse(data, size, size + (1ull << 30), "/nonexistent/fuzz.gguf", &file) != XP_OK)
        return 0;
    for (size_t i = 0; i < sizeof(keys) / sizeof(keys[0]); i++)
        read_key(file, keys[i]);
    for (size_t i = 0; i < gguf_tensor_count(file); i++) {
        const gguf_tensor_t *tensor = gguf_tensor_at(file, i);
        XP_ASSERT(strlen(tensor->name) > 0);
        XP_ASSERT(tensor->offset + tensor->bytes <= size + (1ull << 30));
    }
    memset(&spec, 0, sizeof(spec));
    (void)spec_from_gguf(file, &spec);
    gguf_close(file);
    return 0;
}
