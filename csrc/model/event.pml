/* The public event flag (event.c): bits, a count of sleepers, wakers of which one may be killed, one waiter per
 * bit.
 *
 * Proves, for every interleaving of the steps below and within the bounds of the configuration: each wait ends with
 * its bit, though another waker of the same bit was killed between setting it and its futex call, because the next
 * one's call frees the waiter; and though another waiter was killed and left its count behind. A sleep for ever is
 * an invalid end state.
 *
 * Does not prove the memory orders. Spin's memory is sequentially consistent, as all accesses of event.c are. What
 * a weaker order would permit is here as a mutant: "looks at sleepers before it sets bits" and "counts itself when
 * it sleeps already" are the store and the load of EVENT_SLEEP in the other order (the sleeper's load that counts
 * is the kernel's, when it compares the word; the one before it saves a call). Two waiters for one bit are not
 * modelled: the first takes it and the other sleeps on, by design. Deadlines and signals only end sleeps and are
 * left out.
 *
 * Each statement is one access to shared memory. The mutants are made by tests/csrc/test_model.py, which replaces
 * lines of this file.
 */
#ifndef WAITERS
#define WAITERS 2 /* waiter i waits for bit i */
#endif
#ifndef WAITS
#define WAITS 1 /* of each waiter, one after the other */
#endif
#ifndef WAITER_DEATHS
#define WAITER_DEATHS 0 /* waiters that may be killed */
#endif

#define ALL ((1 << WAITERS) - 1)

byte bits, sleepers;    /* the flag */
byte queued;            /* the kernel's futex queue: bit i is waiter i, which sleeps with the mask 1 << i */

/* Not in any memory: what the model knows. */
byte served[WAITERS];   /* waits of waiter i that have ended */
bit killed[WAITERS];
bit victim_killed;

inline futex_wake(mask) { queued = queued & ~(mask) }

inline event_wake(mask) {
    bits = bits | (mask); /* pairs: EVENT_SLEEP */
    if
    :: sleepers -> futex_wake(mask) /* pairs: EVENT_SLEEP */
    :: else
    fi
}

inline event_wait(mask) {
    do
    :: bits & (mask) ->
        d_step { got = bits & (mask); bits = bits & ~(mask) };
        if
        :: got -> break
        :: else
        fi
    :: else ->
        sleepers++; /* pairs: EVENT_SLEEP */
        now = bits; /* pairs: EVENT_SLEEP */
        if
        :: !(now & (mask)) ->
            d_step {
                if
                :: bits == now -> queued = queued | (mask)
                :: else
                fi
            };
            !(queued & (mask))
        :: else
        fi;
        sleepers--
    od
}

proctype waiter(byte me) {
    byte now, got;
    {
        do
        :: served[me] < WAITS ->
            event_wait(1 << me);
            assert(got == 1 << me);
            d_step { served[me]++; got = 0; now = 0 }
        :: else -> break
        od
    } unless { killed[me] }
}

/* Wakes waiter `me` once for each of its waits, and not before the wait before that has ended. */
proctype waker(byte me) {
    byte round;
    do
    :: round < WAITS ->
        served[me] >= round || killed[me];
        event_wake(1 << me);
        round++
    :: else -> break
    od
}

/* Wakes one waiter or all, whenever it likes, unless it is killed before. */
proctype victim() {
    byte mask;
    if
    :: mask = 1
    :: mask = ALL
    fi;
    { event_wake(mask) } unless { victim_killed }
}

proctype killer() {
    byte deaths = WAITER_DEATHS, who;
    if
    :: victim_killed = 1
    :: true
    fi;
    do
    :: deaths > 0 ->
        if
        :: who = 0
        :: who = WAITERS - 1
        fi;
        d_step { killed[who] = 1; queued = queued & ~(1 << who) }; /* the kernel takes the dead off its queue */
        deaths--
    :: break
    od
}

init {
    atomic {
        byte who;
        for (who : 0 .. WAITERS - 1) {
            run waiter(who);
            run waker(who)
        }
        run victim();
        run killer()
    }
}
