/* SPDX-License-Identifier: MIT */
/* The table of wanted answers: made by one process before a scene, mapped by every Instance. */
#include "instance_table.h"

#include <fcntl.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "ffn/ffn.h"
#include "kernels/kernels.h"

#define TABLE_MAGIC   0x3145424154505801ull
#define TABLE_TRIALS  4u    /* disturbed copies of a row */
#define TABLE_DISTURB 3e-4f /* of an element, relative */
#define TABLE_FAIR    4e-3  /* how far a disturbed row's answer may go, relative */
#define TABLE_BATCH   40u   /* rows of one execution, a multiple of TABLE_TRIALS + 1 */
#define TABLE_TRIED   20u   /* rows tried for each that is wanted */

typedef struct table_head {
    uint64_t magic;
    uint32_t hidden, layers, rows, dtype;
    uint64_t bytes;
} table_head_t;

static uint64_t table_next(uint64_t *state)
{
    uint64_t z = (*state += 0x9e3779b97f4a7c15ull);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
    return z ^ (z >> 31);
}

/* Sum of uniform numbers: near enough to a normal one of variance 1. */
static float table_normal(uint64_t *state)
{
    float sum = 0;
    for (uint32_t i = 0; i < 3; i++)
        sum += (float)(int32_t)table_next(state) * 0x1p-31f;
    return sum;
}

static void table_round(xp_dtype_t dtype, float *row, uint32_t count, void *packed)
{
    if (dtype == XP_DTYPE_F32)
        return;
    kernels_convert(XP_DTYPE_F32, row, dtype, packed, count);
    kernels_convert(dtype, packed, XP_DTYPE_F32, row, count);
}

static double table_distance(const float *got, const float *want, uint32_t count)
{
    double difference = 0, size = 0;
    for (uint32_t i = 0; i < count; i++) {
        if (!isfinite(got[i]))
            return INFINITY;
        difference += ((double)got[i] - want[i]) * ((double)got[i] - want[i]);
        size += (double)want[i] * want[i];
    }
    return size > 0 ? sqrt(difference / size) : (difference > 0 ? INFINITY : 0);
}

bool table_near(const table_t *table, uint32_t layer, uint32_t row, const float *got)
{
    /* Activations are rounded between the two products, outputs at the end. */
    const double limit = table->dtype == XP_DTYPE_BF16  ? 8e-3
                         : table->dtype == XP_DTYPE_F16 ? 2e-3
                                                        : 1e-6;
    const float *want = table->want + ((uint64_t)layer * table->rows + row) * table->hidden;
    if (!(table_distance(got, want, table->hidden) <= limit))
        return false;
    double size = 0;
    for (uint32_t i = 0; i < table->hidden; i++)
        size += (double)want[i] * want[i];
    const double most = 8 * limit * sqrt(size / table->hidden);
    for (uint32_t i = 0; i < table->hidden; i++)
        if (fabs((double)got[i] - want[i]) > most)
            return false;
    return true;
}

typedef struct table_maker {
    const table_options_t *options;
    ffn_runtime_t *runtime;
    uint32_t hidden, layers, rows;
    float *in, *out;     /* [TABLE_BATCH][hidden] */
    float *answer;       /* [layers][TABLE_BATCH / (TABLE_TRIALS + 1)][hidden] */
    float *input, *want; /* of the file */
    void *packed;
    uint64_t state;
} table_maker_t;

/* Every row is followed by its disturbed copies. */
static void maker_fill(table_maker_t *m)
{
    for (uint32_t r = 0; r < TABLE_BATCH; r++) {
        float *row = m->in + (size_t)r * m->hidden;
        const float *whole = m->in + (size_t)(r - r % (TABLE_TRIALS + 1)) * m->hidden;
        for (uint32_t k = 0; k < m->hidden; k++)
            row[k] = r % (TABLE_TRIALS + 1)
                         ? whole[k] * (1 + TABLE_DISTURB * table_normal(&m->state))
                         : table_normal(&m->state);
        if (r % (TABLE_TRIALS + 1) == 0)
            table_round(m->options->dtype, row, m->hidden, m->packed);
    }
}

/* One batch: the rows of it that are fair in all layers join the pool. */
static xp_status_t maker_batch(table_maker_t *m)
{
    const uint32_t group = TABLE_TRIALS + 1, groups = TABLE_BATCH / group, hidden = m->hidden;
    bool fair[TABLE_BATCH / (TABLE_TRIALS + 1)];
    maker_fill(m);
    for (uint32_t g = 0; g < groups; g++)
        fair[g] = true;
    for (uint32_t l = 0; l < m->layers; l++) {
        XP_TRY(ffn_runtime_execute(m->runtime, 0, 0, l, TABLE_BATCH, m->in, m->out));
        for (uint32_t g = 0; g < groups; g++) {
            const float *own = m->out + (size_t)g * group * hidden;
            for (uint32_t t = 1; t < group; t++)
                fair[g] =
                    fair[g] && table_distance(own + (size_t)t * hidden, own, hidden) <= TABLE_FAIR;
            memcpy(m->answer + ((size_t)l * groups + g) * hidden, own, hidden * sizeof(float));
        }
    }
    for (uint32_t g = 0; g < groups && m->rows < m->options->rows; g++) {
        if (!fair[g])
            continue;
        memcpy(m->input + (size_t)m->rows * hidden, m->in + (size_t)g * group * hidden,
               hidden * sizeof(float));
        for (uint32_t l = 0; l < m->layers; l++)
            memcpy(m->want + ((size_t)l * m->options->rows + m->rows) * hidden,
                   m->answer + ((size_t)l * groups + g) * hidden, hidden * sizeof(float));
        m->rows++;
    }
    return XP_OK;
}

static xp_status_t maker_write(const table_maker_t *m)
{
    const size_t inputs = (size_t)m->rows * m->hidden, answers = inputs * m->layers;
    const table_head_t head = {.magic = TABLE_MAGIC,
                               .hidden = m->hidden,
                               .layers = m->layers,
                               .rows = m->rows,
                               .dtype = (uint32_t)m->options->dtype,
                               .bytes = sizeof(head) + (inputs + answers) * sizeof(float)};
    char part[4096];
    snprintf(part, sizeof(part), "%s.part", m->options->out);
    FILE *file = fopen(part, "wb");
    if (!file)
        return xp_fail_errno(XP_IO, "cannot write %s", part);
    bool good = fwrite(&head, sizeof(head), 1, file) == 1 &&
                fwrite(m->input, sizeof(float), inputs, file) == inputs &&
                fwrite(m->want, sizeof(float), answers, file) == answers;
    good = fclose(file) == 0 && good;
    if (!good || rename(part, m->options->out) != 0)
        return xp_fail_errno(XP_IO, "cannot write %s", m->options->out);
    return XP_OK;
}

xp_status_t table_make(const table_options_t *options)
{
    static model_spec_t spec;
    table_maker_t m = {.options = options, .state = options->seed};
    const ffn_runtime_config_t config = {
        .threads = options->threads, .lanes = 1, .max_rows = TABLE_BATCH};
    const ffn_install_t install = {.model_id = "table",
                                   .path = options->path,
                                   .dtype = options->dtype,
                                   .dummy = options->dummy,
                                   .tp_size = 1,
                                   .readers = options->threads};
    XP_TRY(kernels_select());
    XP_TRY(model_spec_load(options->path, &spec));
    m.hidden = spec.hidden;
    m.layers = spec.layers;
    const size_t row = spec.hidden * sizeof(float);
    xp_status_t status = ffn_runtime_create(&config, &m.runtime);
    if (status == XP_OK)
        status = ffn_runtime_install(m.runtime, &install);
    m.in = malloc(TABLE_BATCH * row);
    m.out = malloc(TABLE_BATCH * row);
    m.packed = malloc(row);
    m.answer = malloc(TABLE_BATCH * row * spec.layers);
    m.input = malloc(options->rows * row);
    m.want = malloc(options->rows * row * spec.layers);
    if (status == XP_OK && (!m.in || !m.out || !m.packed || !m.answer || !m.input || !m.want))
        status = xp_fail(XP_NO_MEMORY, "no memory for %u rows", options->rows);
    for (uint32_t tried = 0; status == XP_OK && m.rows < options->rows;) {
        status = maker_batch(&m);
        tried += TABLE_BATCH / (TABLE_TRIALS + 1);
        if (status == XP_OK && m.rows < options->rows && tried > options->rows * TABLE_TRIED)
            status = xp_fail(XP_INVALID, "%s: of %u rows only %u have a clear choice of experts",
                             options->path, tried, m.rows);
    }
    if (status == XP_OK)
        status = maker_write(&m);
    ffn_runtime_destroy(m.runtime);
    free(m.in);
    free(m.out);
    free(m.packed);
    free(m.answer);
    free(m.input);
    free(m.want);
    return status;
}

xp_status_t table_open(const char *path, table_t *table_out)
{
    struct stat info;
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0 || fstat(fd, &info) != 0) {
        if (fd >= 0)
            close(fd);
        return xp_fail_errno(XP_IO, "cannot read %s", path);
    }
    const uint64_t bytes = (uint64_t)info.st_size;
    void *map = bytes >= sizeof(table_head_t) ? mmap(NULL, bytes, PROT_READ, MAP_SHARED, fd, 0)
                                              : MAP_FAILED;
    close(fd);
    if (map == MAP_FAILED)
        return xp_fail(XP_IO, "cannot map %s", path);
    const table_head_t *head = map;
    if (head->magic != TABLE_MAGIC || head->bytes != bytes) {
        munmap(map, bytes);
        return xp_fail(XP_INVALID, "%s is no table of this program", path);
    }
    *table_out = (table_t){.hidden = head->hidden,
                           .layers = head->layers,
                           .rows = head->rows,
                           .dtype = (xp_dtype_t)head->dtype,
                           .input = (const float *)(head + 1),
                           .map = map,
                           .bytes = bytes};
    table_out->want = table_out->input + (uint64_t)head->rows * head->hidden;
    return XP_OK;
}

void table_close(table_t *table)
{
    if (table->map)
        munmap(table->map, table->bytes);
}
