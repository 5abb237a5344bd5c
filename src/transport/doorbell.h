/* SPDX-License-Identifier: MIT */
/* The Generation's doorbell page: made by the daemon, mapped by agents and Instances. */
#ifndef XPOOL_TRANSPORT_DOORBELL_H
#define XPOOL_TRANSPORT_DOORBELL_H

#include "base/status.h"
#include "transport/mailbox.h"

/* Makes the page (memfd "xpool-doorbell") for `pes` participants. */
xp_status_t transport_doorbell_make(uint32_t pes, int *fd_out);
/* For PEs that replace others, once those are dead: nobody sleeps on a line any more. Who rings
 * goes on with the same page. */
xp_status_t transport_doorbell_renew(int fd);
/* Maps it and checks that PE `pe` has a line. xp_memfd_unmap() ends it. */
xp_status_t transport_doorbell_map(int fd, uint32_t pe, doorbell_page_t **page_out);
#endif
