/* SPDX-License-Identifier: MIT */
/*
 * No allocation on the message path: the program's own malloc counts. All roles run as threads, so
 * what any of them takes between two calls is seen.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include "rig.h"

#include "count_allocations.h"

static void test_message_path(void **state)
{
    static rig_t rig;
    if (!COUNTS)
        skip();
    for (uint32_t form = FABRIC_FORM_EAGER; form <= FABRIC_FORM_LONG; form++)
        for (uint32_t group = 1; group <= 2; group++) {
            rig_client_t client;
            rig_plan(&rig, 1, 2, 1, group);
            rig.plan.instances[0].form = form;
            rig_start(&rig);
            rig_client_create(&rig, 0, 0, &client);
            rig_client_attach(&client);
            for (uint32_t i = 0; i < 50; i++)
                assert_int_equal(rig_call(&client, rig_in(5000)), XP_OK);
            uint64_t before = atomic_load(&allocations);
            for (uint32_t i = 0; i < 500; i++)
                if (rig_call(&client, rig_in(5000)) != XP_OK)
                    fail();
            assert_int_equal(atomic_load(&allocations), before);
            rig_client_destroy(&client);
            rig_stop(&rig);
        }
    assert_true(atomic_load(&allocations) > 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_message_path)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
