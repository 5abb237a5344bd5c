/* SPDX-License-Identifier: MIT */
/*
 * The tokenizer of synthetic checkpoints: byte-level BPE with three special tokens, the 256 bytes,
 * and as many systematic merges as the vocabulary has room for, so that every id has a text. Every
 * merge adds one letter to an earlier token: merge n < 702 joins a space or a letter with a letter,
 * merge n >= 702 joins merge (n - 702) / 26 with a letter. Owns nothing.
 */
#include <string.h>

#include "model/synth_private.h"

#define SYNTH_FIRST_LEVEL (27u * 26u)

const char synth_chat_template[] =
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + "
    "message['content'] + '<|im_end|>\\n' }}{% endfor %}{% if add_generation_prompt %}{{ "
    "'<|im_start|>assistant\\n' }}{% endif %}";

static const char *const synth_specials[SYNTH_SPECIALS] = {"<|endoftext|>", "<|im_start|>",
                                                           "<|im_end|>"};

/* GPT-2's byte alphabet: printable Latin-1 bytes stand for themselves, the others for U+0100 and up
 * in their order. */
static uint32_t synth_byte_code_point(uint32_t byte)
{
    uint32_t shifted = 0;
    for (uint32_t b = 0; b <= byte; b++) {
        bool printable = (b >= 0x21 && b <= 0x7e) || (b >= 0xa1 && b <= 0xac) || b >= 0xae;
        if (b == byte)
            return printable ? b : 256 + shifted;
        shifted += !printable;
    }
    return 0;
}

static void synth_byte_text(uint32_t byte, char out[64])
{
    uint32_t code = synth_byte_code_point(byte);
    if (code < 0x80) {
        out[0] = (char)code;
        out[1] = '\0';
    } else {
        out[0] = (char)(0xc0 | code >> 6);
        out[1] = (char)(0x80 | (code & 0x3f));
        out[2] = '\0';
    }
}

void synth_merge(uint32_t index, char left[64], char right[64])
{
    uint32_t parent = index / 26;
    if (index >= SYNTH_FIRST_LEVEL)
        synth_token_text(SYNTH_MIN_VOCAB + (index - SYNTH_FIRST_LEVEL) / 26, left);
    else if (parent == 0)
        synth_byte_text(' ', left);
    else
        synth_byte_text('a' + parent - 1, left);
    synth_byte_text('a' + index % 26, right);
}

void synth_token_text(uint32_t id, char out[64])
{
    if (id < SYNTH_SPECIALS) {
        strcpy(out, synth_specials[id]);
    } else if (id < SYNTH_MIN_VOCAB) {
        synth_byte_text(id - SYNTH_SPECIALS, out);
    } else {
        /* The tree is at most six levels deep for 2^24 tokens, so this recursion is shallow. */
        char right[64];
        synth_merge(id - SYNTH_MIN_VOCAB, out, right);
        strcat(out, right);
    }
}

static xp_status_t synth_json_text(xp_buf_t *text, const char *value)
{
    XP_TRY(xp_buf_append(text, "\"", 1));
    for (const char *at = value; *at; at++) {
        const char *escaped = *at == '"' ? "\\\"" : *at == '\\' ? "\\\\" : NULL;
        XP_TRY(escaped ? xp_buf_append(text, escaped, 2) : xp_buf_append(text, at, 1));
    }
    return xp_buf_append(text, "\"", 1);
}

static const char synth_tokenizer_head[] =
    ", \"normalizer\": {\"type\": \"NFC\"}, \"pre_tokenizer\": {\"type\": \"Sequence\", "
    "\"pretokenizers\": [{\"type\": \"Split\", \"pattern\": {\"Regex\": "
    "\"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\\\r\\\\n\\\\p{L}\\\\p{N}]?\\\\p{L}+|\\\\p{N}| "
    "?[^\\\\s\\\\p{L}\\\\p{N}]+[\\\\r\\\\n]*|\\\\s*[\\\\r\\\\n]+|\\\\s+(?!\\\\S)|\\\\s+\"}, "
    "\"behavior\": \"Isolated\", \"invert\": false}, {\"type\": \"ByteLevel\", "
    "\"add_prefix_space\": false, \"trim_offsets\": false, \"use_regex\": false}]}, "
    "\"post_processor\": {\"type\": \"ByteLevel\", \"add_prefix_space\": false, "
    "\"trim_offsets\": false, \"use_regex\": false}, \"decoder\": {\"type\": \"ByteLevel\", "
    "\"add_prefix_space\": false, \"trim_offsets\": false, \"use_regex\": false}, \"model\": "
    "{\"type\": \"BPE\", \"dropout\": null, \"unk_token\": null, \"continuing_subword_prefix\": "
    "null, \"end_of_word_suffix\": null, \"fuse_unk\": false, \"byte_fallback\": false, "
    "\"ignore_merges\": false, \"vocab\": {";

xp_status_t synth_tokenizer_json(uint32_t vocab, xp_buf_t *text)
{
    char left[64], right[64];
    XP_TRY(xp_buf_append_text(text, "{\"version\": \"1.0\", \"truncation\": null, \"padding\": "
                                    "null, \"added_tokens\": ["));
    for (uint32_t id = 0; id < SYNTH_SPECIALS; id++)
        XP_TRY(xp_buf_printf(text,
                             "%s{\"id\": %u, \"content\": \"%s\", \"single_word\": false, "
                             "\"lstrip\": false, \"rstrip\": false, \"normalized\": false, "
                             "\"special\": true}",
                             id ? ", " : "", id, synth_specials[id]));
    XP_TRY(xp_buf_append_text(text, "]"));
    XP_TRY(xp_buf_append_text(text, synth_tokenizer_head));
    for (uint32_t id = 0; id < vocab; id++) {
        synth_token_text(id, left);
        XP_TRY(xp_buf_append_text(text, id ? ", " : ""));
        XP_TRY(synth_json_text(text, left));
        XP_TRY(xp_buf_printf(text, ": %u", id));
    }
    XP_TRY(xp_buf_append_text(text, "}, \"merges\": ["));
    for (uint32_t i = 0; SYNTH_MIN_VOCAB + i < vocab; i++) {
        synth_merge(i, left, right);
        XP_TRY(xp_buf_printf(text, "%s[\"%s\", \"%s\"]", i ? ", " : "", left, right));
    }
    return xp_buf_append_text(text, "]}}\n");
}

xp_status_t synth_tokenizer_config_json(uint32_t context, xp_buf_t *text)
{
    XP_TRY(xp_buf_append_text(text, "{\n  \"tokenizer_class\": \"PreTrainedTokenizerFast\",\n"
                                    "  \"add_bos_token\": false,\n  \"add_prefix_space\": false,\n"
                                    "  \"added_tokens_decoder\": {\n"));
    for (uint32_t id = 0; id < SYNTH_SPECIALS; id++)
        XP_TRY(xp_buf_printf(text,
                             "    \"%u\": {\"content\": \"%s\", \"lstrip\": false, "
                             "\"normalized\": false, \"rstrip\": false, \"single_word\": false, "
                             "\"special\": true}%s\n",
                             id, synth_specials[id], id + 1 < SYNTH_SPECIALS ? "," : ""));
    XP_TRY(xp_buf_printf(text,
                         "  },\n  \"additional_special_tokens\": [\"%s\", \"%s\"],\n"
                         "  \"bos_token\": null,\n  \"eos_token\": \"%s\",\n"
                         "  \"pad_token\": \"%s\",\n  \"unk_token\": null,\n"
                         "  \"clean_up_tokenization_spaces\": false,\n"
                         "  \"model_max_length\": %u,\n  \"chat_template\": ",
                         synth_specials[1], synth_specials[2], synth_specials[2], synth_specials[0],
                         context));
    XP_TRY(synth_json_text(text, synth_chat_template));
    return xp_buf_append_text(text, "\n}\n");
}
