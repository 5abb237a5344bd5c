/* SPDX-License-Identifier: MIT */
/* Control channel packets: whatever a peer sends is decoded within the schema's maxima or refused.
 */
#include <stddef.h>
#include <stdint.h>

#include "wire/wire.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    xpw_Envelope envelope;
    if (size <= WIRE_MAX_BYTES && wire_decode(data, size, &envelope) == XP_OK)
        (void)wire_body_name(envelope.which_body);
    return 0;
}
