/* One word: an end whose thread sleeps on its wait word alone, because the bridge of its own process watches its peer's life for
 * it (sleep_on_one of sleep.c, bridge_tell of bridge.c). Checked by Spin.
 *
 * Proves, for every interleaving of the steps below and within the bounds of the configuration: the sleeper gets every
 * element that its peer published, whatever killed that where, and then learns of its peer's end; a call of it, and a
 * stop, are noticed. A sleep for ever is an invalid end state.
 *
 * Does not prove the memory orders: each is seq_cst. The ring is one counter here, and the bridge has one bell, which
 * hangs before the sleeper begins; queue.pml has the rest of both.
 *
 * Each statement is one access to shared memory, or to the sleeper's own words, which two more threads of its process
 * share. The mutants are made by tests/csrc/test_model.py, which replaces lines of this file.
 */
#ifndef ELEMENTS
#define ELEMENTS 2 /* that the peer publishes, at most */
#endif
#ifndef DEATHS
#define DEATHS 0 /* 1: the peer may be killed at any step */
#endif
#ifndef CALLS
#define CALLS 0 /* 1: another thread calls the sleeper (sleep_call), and the peer does not end before that was noticed */
#endif
#ifndef STOPS
#define STOPS 0 /* 1: another thread stops the end, and the peer does not end at all */
#endif

#define ALIVE 1 /* a life word */
#define RELEASED 2
#define DEAD 3

byte counter;           /* what was published */
byte life = ALIVE;
/* The wait word, which counts: whether it is odd, and whether it is still what the sleeper made of it. */
bit is_odd, as_announced;
bit on_wait;            /* the sleeper, on that word */
bit bell_on_life;       /* the bridge, on the peer's life word */

/* The sleeper's process. */
byte ended;             /* a counter: changed by whoever tells, never back */
bit stopped, called;

/* Not in any memory: what the model knows. */
bit killed, noticed;
byte got;

inline wake() { on_wait = 0 }

/* tell_own_threads: what has to be seen is changed before the word is. */
inline tell() {
    ended++;
    as_announced = 0; /* + 2: as odd as before.  pairs: TOLD */
    wake()
}

/* ---- the peer ------------------------------------------------------------------------------------------------------ */

proctype peer() {
    {
        do
        :: counter < ELEMENTS ->
            counter++; /* pairs: VISIBLE, pairs: SLEEP */
            if
            :: is_odd -> /* pairs: SLEEP */
                d_step { is_odd = 0; as_announced = 0 }; /* + 1 */
                wake()
            :: else
            fi
        :: true -> break
        od;
        if
        :: CALLS -> noticed
        :: !CALLS
        fi;
        if
        :: !STOPS -> atomic { life = RELEASED; bell_on_life = 0 } /* pairs: DEAD */
        :: STOPS
        fi
    } unless { killed }
}

proctype kernel() {
    if
    :: DEATHS ->
        if
        :: atomic { life == ALIVE -> killed = 1 };
            life = DEAD; /* pairs: DEAD */
            bell_on_life = 0
        :: life != ALIVE
        fi
    :: !DEATHS
    fi
}

/* ---- the sleeper's process ------------------------------------------------------------------------------------------- */

proctype bridge() {
    byte saw;
    do
    :: true ->
        saw = life; /* pairs: DEAD */
        if
        :: saw != ALIVE -> tell(); break
        :: else ->
            d_step { bell_on_life = (life == saw) };
end:        !bell_on_life
        fi
    od
}

proctype sleeper() {
    byte saw_ended, saw_life;
    do
    :: true ->
        saw_ended = ended;
        saw_life = life; /* pairs: DEAD */
        d_step { is_odd = 1; as_announced = 1 }; /* pairs: SLEEP */
        if
        :: counter > got -> got++ /* pairs: VISIBLE, pairs: SLEEP */
        :: else ->
            if
            :: stopped -> break /* pairs: STOP */
            :: !stopped && saw_life != ALIVE ->
                assert(got == counter); /* last words first */
                break
            :: !stopped && saw_life == ALIVE && called -> called = 0; noticed = 1
            :: else ->
                if
                :: ended != saw_ended /* pairs: TOLD */
                :: else ->
                    d_step { on_wait = as_announced };
                    !on_wait
                fi
            fi
        fi
    od
}

/* Another thread. */
proctype other() {
    if
    :: CALLS -> called = 1; tell()
    :: !CALLS
    fi;
    if
    :: STOPS ->
        stopped = 1; /* pairs: STOP */
        tell()
    :: !STOPS
    fi
}

init {
    atomic {
        run peer();
        run kernel();
        run bridge();
        run sleeper();
        run other()
    }
}
