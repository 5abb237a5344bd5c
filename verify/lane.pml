/* SPDX-License-Identifier: MIT */
/* The Lane lease in the long form: two Instances with one AtnAgent slot each compete for one Lane of a
 * group of two FfnAgents, the first of which commits; either Instance may be detached at any moment.
 * Checked: the Lane has one owner at a time; members read the rows of the Invocation they execute;
 * a consumer reads its own result; every slot comes back to IDLE and the Lane is free in the end,
 * also after an Instance has gone. Waiting is modelled by guards: bell.pml and mailbox.pml show that
 * bells do not lose what guards cannot lose.
 *
 * Planted mistakes, each of which Spin must find:
 *   BUG_RELEASE_WITHOUT_ACK   the Lane is free once it is complete, before the consumer has copied
 *   BUG_ABANDON_WITHOUT_INPUT a detached Instance's slot never says Input Ready
 *   BUG_ABANDON_IS_IDLE       a detached Instance's slot is reused before its Submission has come back
 *   BUG_COMMIT_BEFORE_PARTIALS the first member does not wait for the other's partial
 */
#define INSTANCES 2
#define ROUNDS    2
#define VALUE(i, s) ((i) * 4 + (s))

#ifdef BUG_RELEASE_WITHOUT_ACK
#define ACKNOWLEDGED true
#else
#define ACKNOWLEDGED (output_ack[owner] == handled[owner])
#endif
/* An Instance without a lease has a Submission that is not queued yet. */
#define NEWS(i) (submission[i] != handled[i] && !queued[i] && !(lane_leased && owner == i))

/* Records, one writer each; a record is its sequence or ticket. */
byte submission[INSTANCES], abandon[INSTANCES], input_ready[INSTANCES], output_ack[INSTANCES];
byte admission[INSTANCES], commit[INSTANCES];
bool dropped[INSTANCES];
byte execution[2], execution_owner[2], execution_sequence[2];
byte partial_ready, completion;

/* Payload of the Lane. */
byte lane_input, lane_output, lane_partial[2];

/* For the checks. */
bool lane_leased;
byte finished, owners;

proctype Slot(byte i)
{
    byte sequence = 0;
    bool gone;
    do
    :: sequence == ROUNDS -> break
    :: else ->
        gone = false;
        sequence++;
        submission[i] = sequence; /* atn_submit */
        /* WAIT_ADMISSION */
        do
        :: admission[i] == sequence -> break
        :: commit[i] == sequence -> goto dropped_by_coordinator
        :: !gone -> gone = true; abandon[i] = sequence /* atn_abandon */
#ifdef BUG_ABANDON_IS_IDLE
            ; goto next
#endif
        od;
        /* atn_deliver_input */
        if
        :: gone ->
#ifdef BUG_ABANDON_WITHOUT_INPUT
            goto wait_commit
#else
            skip
#endif
        :: !gone -> lane_input = VALUE(i, sequence)
        :: !gone -> gone = true; abandon[i] = sequence
        fi;
        input_ready[i] = sequence;
wait_commit:
        do
        :: commit[i] == sequence -> break
        :: !gone -> gone = true; abandon[i] = sequence
        od;
        /* atn_take_commit */
        if
        :: gone -> skip
        :: else -> assert(lane_output == VALUE(i, sequence) * 2 + 1)
        fi;
        output_ack[i] = sequence; /* atn_finish */
        goto next;
dropped_by_coordinator:
        assert(gone && dropped[i]);
next:
progress_slot:
        skip
    od;
    finished++
}

proctype Coordinator()
{
    byte handled[INSTANCES], ticket = 0, owner = 0;
    bool queued[INSTANCES];
end:
    do
    :: NEWS(0) -> /* coordinator_gather */
        assert(submission[0] == handled[0] + 1); /* coordinator_check */
        queued[0] = true
    :: NEWS(1) ->
        assert(submission[1] == handled[1] + 1);
        queued[1] = true
    :: queued[0] && abandon[0] >= submission[0] -> /* coordinator_drop */
        queued[0] = false;
        handled[0] = submission[0];
        dropped[0] = true;
        commit[0] = handled[0]
    :: queued[1] && abandon[1] >= submission[1] ->
        queued[1] = false;
        handled[1] = submission[1];
        dropped[1] = true;
        commit[1] = handled[1]
    :: !lane_leased && (queued[0] || queued[1]) -> /* coordinator_admit, coordinator_lease */
        if
        :: queued[0] -> owner = 0
        :: queued[1] -> owner = 1
        fi;
        assert(owners == 0);
        owners++;
        lane_leased = true;
        queued[owner] = false;
        handled[owner] = submission[owner];
        dropped[owner] = false;
        ticket++;
        admission[owner] = handled[owner];
        execution_owner[0] = owner;
        execution_sequence[0] = handled[owner];
        execution[0] = ticket;
        execution_owner[1] = owner;
        execution_sequence[1] = handled[owner];
        execution[1] = ticket
    :: lane_leased && completion == ticket && ACKNOWLEDGED -> /* coordinator_release */
        owners--;
        lane_leased = false
    od
}

proctype Member(byte m)
{
    byte ticket = 0, owner, sequence;
end:
    do
    :: execution[m] != ticket -> /* ffn_take_execution */
        assert(execution[m] > ticket);
        ticket = execution[m];
        owner = execution_owner[m];
        sequence = execution_sequence[m];
        input_ready[owner] >= sequence; /* ffn_inputs_ready */
        assert(lane_input == VALUE(owner, sequence) || abandon[owner] >= sequence);
        lane_partial[m] = lane_input + m; /* ffn_execute */
        if
        :: m == 1 -> partial_ready = ticket /* ffn_deliver_partial */
        :: else ->
#ifndef BUG_COMMIT_BEFORE_PARTIALS
            partial_ready == ticket;
#endif
            lane_output = lane_partial[0] + lane_partial[1]; /* ffn_reduce */
            completion = ticket;                             /* ffn_commit */
            commit[owner] = sequence
        fi
    od
}

/* In the end the Lane is free: a lease that never ends blocks here. */
proctype Check()
{
    finished == INSTANCES;
    !lane_leased
}

init {
    atomic {
        run Slot(0);
        run Slot(1);
        run Coordinator();
        run Member(0);
        run Member(1);
        run Check()
    }
}
