/* SPDX-License-Identifier: MIT */
/*
 * The inside of a tokenizer (private to src/text): what loaders fill in and the encoder and decoder
 * read. A tokenizer is immutable once a loader has returned it.
 */
#ifndef XPOOL_TEXT_INTERNAL_H
#define XPOOL_TEXT_INTERNAL_H

#include "base/buf.h"
#include "base/status.h"
#include "text/regex.h"
#include "text/tokenizer.h"
#include "text/unicode.h"

#define TEXT_MAX_FILE_BYTES  (256u << 20)
#define TEXT_MAX_TOKENS      (4u << 20)
#define TEXT_MAX_TOKEN_BYTES 65536u
#define TEXT_MAX_STAGES      32
#define TEXT_MAX_SPECIALS    16
/* Text that normalizers and pre-tokenizers may make of the largest input. */
#define TEXT_MAX_EXPANDED_BYTES (TOKENIZER_MAX_TEXT_BYTES * 8ull)

/* ---- strings and maps (map.c) ---- */

/* Memory that is freed all at once. */
typedef struct text_arena {
    struct text_arena_block *blocks;
    size_t used, capacity;
} text_arena_t;
void *text_arena_take(text_arena_t *arena, size_t bytes); /* NULL without memory */
void text_arena_fini(text_arena_t *arena);

typedef struct text_map_entry {
    const char *text; /* NULL: free */
    uint32_t length, hash;
    int32_t id;
} text_map_entry_t;
typedef struct text_map {
    text_map_entry_t *entries;
    size_t capacity, count; /* capacity is a power of two */
} text_map_t;
xp_status_t text_map_init(text_map_t *map, size_t expected);
void text_map_fini(text_map_t *map);
/* -1 when absent. */
int32_t text_map_get(const text_map_t *map, const char *text, size_t length);
/* The text must outlive the map; an entry of the same text is replaced. */
xp_status_t text_map_put(text_map_t *map, const char *text, size_t length, int32_t id);

typedef struct text_ids {
    int32_t *data;
    size_t count, capacity;
} text_ids_t;
xp_status_t text_ids_push(text_ids_t *ids, int32_t id);

/* ---- stages ---- */

typedef enum normalizer_kind {
    NORMALIZER_FORM = 0,
    NORMALIZER_LOWERCASE,
    NORMALIZER_PREPEND,
    NORMALIZER_REPLACE,
    NORMALIZER_STRIP,
} normalizer_kind_t;
typedef struct normalizer {
    normalizer_kind_t kind;
    text_form_t form;
    bool left, right;
    text_regex_t *regex;
    const char *content;
    size_t content_length;
} normalizer_t;

typedef enum pretokenizer_kind {
    PRETOKENIZER_SPLIT = 0,
    PRETOKENIZER_BYTES,        /* ByteLevel's second half: bytes to letters */
    PRETOKENIZER_SPACE_PREFIX, /* ByteLevel's add_prefix_space */
    PRETOKENIZER_METASPACE,
    PRETOKENIZER_CLASS, /* Digits, Punctuation, WhitespaceSplit */
} pretokenizer_kind_t;
typedef enum split_behavior {
    SPLIT_REMOVED = 0,
    SPLIT_ISOLATED,
    SPLIT_PREVIOUS,
    SPLIT_NEXT,
    SPLIT_CONTIGUOUS,
} split_behavior_t;
typedef enum metaspace_scheme {
    METASPACE_ALWAYS = 0,
    METASPACE_FIRST,
    METASPACE_NEVER
} metaspace_scheme_t;
typedef struct pretokenizer {
    pretokenizer_kind_t kind;
    split_behavior_t behavior;
    bool invert;
    bool split; /* METASPACE */
    metaspace_scheme_t scheme;
    text_regex_t *regex;
    bool (*member)(uint32_t code_point); /* CLASS */
    char replacement[8];                 /* METASPACE, NUL-terminated */
} pretokenizer_t;

/* Decoders that look at one token only are applied when the tokenizer is loaded (token_t.bytes). */
typedef enum decoder_kind {
    DECODER_REPLACE = 0,
    DECODER_METASPACE,
    DECODER_STRIP,
    DECODER_BYTE_LEVEL,
} decoder_kind_t;
typedef struct decoder_stage {
    decoder_kind_t kind;
    text_regex_t *regex;
    const char *content;
    size_t content_length;
    char character[8]; /* METASPACE, STRIP */
    uint32_t start, stop;
    bool drop_first; /* METASPACE: in the first token the character is dropped, not made a space */
} decoder_stage_t;
typedef struct decoder {
    decoder_stage_t stages[TEXT_MAX_STAGES];
    size_t stage_count;
    bool join;          /* no decoder: tokens are joined by a space */
    bool lossy;         /* the bytes of all tokens form one text, invalid parts replaced */
    bool byte_fallback; /* runs of <0xHH> tokens are bytes */
    uint32_t strip;     /* of the whole text's beginning, at most this many times `strip_text` */
    char strip_text[8];
    bool first_differs; /* token_t.first is in use */
} decoder_t;

#define TOKEN_PRESENT 1u
#define TOKEN_SPECIAL 2u
#define TOKEN_BYTE    4u /* with byte fallback: bytes[0] is the byte */
#define TOKEN_ADDED   8u

typedef struct token {
    const char *text;
    const char *bytes;
    const char *first; /* as `bytes`, when it is the first token of a text */
    uint32_t length, bytes_length, first_length;
    uint32_t flags;
} token_t;

typedef struct added_token {
    const char *content;
    size_t length;
    int32_t id;
    bool special, lstrip, rstrip, single_word, normalized;
} added_token_t;
/* Added tokens that are looked for in the same kind of text, sorted by content. */
typedef struct added_set {
    added_token_t *tokens;
    size_t count;
    uint32_t first[257]; /* tokens[first[b] .. first[b + 1]) begin with byte b */
} added_set_t;

typedef struct bpe_merge {
    int32_t left, right;
    uint32_t rank;
    int32_t id;
} bpe_merge_t;
typedef struct bpe {
    bpe_merge_t *merges; /* a hash table; left < 0: free */
    size_t merge_capacity, merge_count;
    uint32_t *ranks; /* by id: merging by scores (GGUF's "llama"); UINT32_MAX never merges */
    int32_t unk;     /* -1 without */
    bool fuse_unk, byte_fallback, ignore_merges;
    int32_t bytes[256];          /* ids of <0xHH>, -1 where missing */
    int32_t letters[0x180];      /* ids of one-character tokens */
    uint32_t longest;            /* bytes of the longest token */
    const char *prefix, *suffix; /* continuing_subword_prefix, end_of_word_suffix; "" without */
} bpe_t;

struct tokenizer {
    text_arena_t arena;
    token_t *tokens;
    uint32_t token_count, token_capacity; /* highest id + 1 */
    uint32_t model_count;                 /* tokens of the model, without added ones */
    text_map_t map;                       /* the model's tokens */
    text_map_t added_map;
    added_token_t *added; /* as loaded */
    size_t added_count, added_capacity;
    int32_t added_highest;
    added_set_t raw, normal; /* found before and after normalization */
    normalizer_t normalizers[TEXT_MAX_STAGES];
    size_t normalizer_count;
    pretokenizer_t pretokenizers[TEXT_MAX_STAGES];
    size_t pretokenizer_count;
    bool needs_matcher;
    bpe_t bpe;
    int32_t prefix[TEXT_MAX_SPECIALS], suffix[TEXT_MAX_SPECIALS];
    size_t prefix_count, suffix_count;
    decoder_t decoder;
};

/* ---- building (build.c) ---- */
tokenizer_t *tokenizer_new(size_t expected_tokens); /* NULL without memory, recorded */
/* Copies the text. */
xp_status_t tokenizer_add_model_token(tokenizer_t *tokenizer, const char *text, size_t length,
                                      int64_t id);
/* An added token gets the id of a token of the same text, else the next free one, as in the
 * library. */
xp_status_t tokenizer_add_token(tokenizer_t *tokenizer, const added_token_t *token);
xp_status_t tokenizer_copy(tokenizer_t *tokenizer, const char *text, size_t length,
                           const char **copy_out);
/* After everything is set: sorts added tokens, makes each token's bytes. */
xp_status_t tokenizer_finish(tokenizer_t *tokenizer);

/* ---- stages at run time ---- */
/* Applies all normalizers (normalize.c). `*begin_lost_out`: the text's first character is gone, so
 * that for Metaspace's "first" the result no longer begins where the text does. */
xp_status_t tokenizer_normalize(const tokenizer_t *tokenizer, text_matcher_t *matcher,
                                const char *text, size_t length, bool *begin_lost_out,
                                xp_buf_t *out);
xp_status_t text_replace(const text_regex_t *regex, text_matcher_t *matcher, const char *text,
                         size_t length, const char *content, size_t content_length, xp_buf_t *out);

/* What one tokenizer_encode() needs (encode.c). */
typedef struct bpe_symbol {
    uint32_t start, length; /* in the piece; length 0: merged away */
    int32_t id, previous, next;
} bpe_symbol_t;
typedef struct bpe_candidate {
    uint32_t rank, position;
    int32_t id;
} bpe_candidate_t;
typedef struct bpe_scratch {
    bpe_symbol_t *symbols;
    size_t symbol_count, symbol_capacity;
    bpe_candidate_t *heap;
    size_t heap_count, heap_capacity;
    xp_buf_t affixed; /* a character with prefix or suffix */
} bpe_scratch_t;
void bpe_scratch_fini(bpe_scratch_t *scratch);
/* Appends the ids of one piece (bpe.c). */
xp_status_t bpe_encode(const tokenizer_t *tokenizer, bpe_scratch_t *scratch, const char *piece,
                       size_t length, text_ids_t *ids);
xp_status_t bpe_init_merges(bpe_t *bpe, size_t expected);
xp_status_t bpe_add_merge(bpe_t *bpe, int32_t left, int32_t right, uint32_t rank, int32_t id);
void bpe_fini(bpe_t *bpe);

/* Hands pieces to `emit` (pretokenize.c). */
typedef struct pretokenize_context {
    const tokenizer_t *tokenizer;
    text_matcher_t *matcher;
    xp_buf_t buffers[TEXT_MAX_STAGES];
    xp_status_t (*emit)(void *context, const char *piece, size_t length);
    void *emit_context;
} pretokenize_context_t;
xp_status_t pretokenize(pretokenize_context_t *context, size_t stage, const char *text,
                        size_t length, bool at_start);

/* The pieces between added tokens (added.c). `found` NULL: ordinary text. */
typedef xp_status_t (*added_emit_t)(void *context, const char *text, size_t length, size_t offset,
                                    const added_token_t *found);
xp_status_t added_set_split(const added_set_t *set, const char *text, size_t length,
                            bool parse_special, added_emit_t emit, void *context);
xp_status_t added_set_init(added_set_t *set, const added_token_t *tokens, size_t count);

/* Fills token_t.bytes and first (decode.c). */
xp_status_t decoder_prepare(tokenizer_t *tokenizer);

/* ---- loaders ---- */
xp_status_t tokenizer_load_gguf(const char *path, tokenizer_t **tokenizer_out);
struct gguf_file;
/* From a file that is open already. */
xp_status_t tokenizer_build_gguf(const struct gguf_file *file, tokenizer_t **tokenizer_out);
#endif
