/* SPDX-License-Identifier: MIT */
/* Which Instances `xpool up` starts again when they have ended with their Generation: the daemon's
 * verdict is made up, the ends are wait statuses. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include <stdio.h>
#include <string.h>

#include "control/client.h"

static xp_status_t made_up(const config_t *config, const char *who, const xpw_Envelope *question,
                           pb_size_t answer, uint64_t limit_ns, xpw_Envelope *answer_out);
#define client_ask made_up
#include "agents/up.c"
#undef client_ask

static uint64_t replace, since_ns;

static xp_status_t made_up(const config_t *config, const char *who, const xpw_Envelope *question,
                           pb_size_t answer, uint64_t limit_ns, xpw_Envelope *answer_out)
{
    *answer_out = (xpw_Envelope){.which_body = xpw_Envelope_verdict_tag};
    answer_out->body.verdict.replace = replace;
    snprintf(answer_out->body.verdict.state, sizeof(answer_out->body.verdict.state), "REGISTERING");
    return XP_OK;
}

/* Whether an Instance that ended so is started again, an agent having died `since_ns` before. */
static bool started_again(bool engine, int wait_status)
{
    static config_t config;
    static up_t up;
    memset(&config, 0, sizeof(config));
    memset(&up, 0, sizeof(up));
    config.atn_count = config.model_count = 1;
    config.atn[0].kind = CONFIG_DEVICE_CUDA;
    snprintf(config.models[0].id, sizeof(config.models[0].id), "m");
    config.deadlines.reform = 60;
    config.deadlines.stop = 1;
    up.config = &config;
    up.ready = true;
    up.changed_ns = xp_monotonic_ns() - since_ns;
    up.count = 1;
    up.children[0] =
        (up_child_t){.pid = 1, .role = xpw_Role_ROLE_INSTANCE, .engine = engine, .name = "m"};
    child_ended(&up, &up.children[0], wait_status);
    assert_int_equal(up.children[0].pid, 0);
    assert_false(up.failed);
    return up.children[0].again_ns != 0;
}

#define EXIT(code) ((code) << 8)

static void who_had_to_end_is_started_again(void **state)
{
    replace = 1;
    assert_true(started_again(false, EXIT(0)));
    assert_true(started_again(true, SIGKILL)); /* SGLang's way to end in order */
    assert_true(started_again(true, EXIT(1)));
    replace = 0;
    assert_false(started_again(false, EXIT(0)));
    assert_false(started_again(true, SIGKILL));
}

/* It could not go on in the next Generation, which took long to come. */
static void however_late(void **state)
{
    since_ns = 20 * XP_NS_PER_S;
    replace = 1;
    assert_true(started_again(false, EXIT(0)));
    assert_true(started_again(true, SIGKILL));
    replace = 0;
    assert_false(started_again(false, EXIT(0)));
    since_ns = 0;
}

/* The daemon cannot know that of an engine: it says so itself. */
static void an_engine_that_was_stopped_stays_so(void **state)
{
    replace = 1;
    assert_false(started_again(true, EXIT(0)));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(who_had_to_end_is_started_again),
        cmocka_unit_test(however_late),
        cmocka_unit_test(an_engine_that_was_stopped_stays_so),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
