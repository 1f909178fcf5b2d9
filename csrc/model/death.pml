/* How a process learns of another one's death: the kernel's walk of the dead one's robust list (life.c), and the second
 * way, by what the kernel closes (link.c, sleep.c). Checked by Spin.
 *
 * The dead process has a list of ENTRIES words. Entry 0 is on a page that it made and sealed, and the survivor sleeps on
 * it; the others are in memory of queues. A neighbour may truncate the last of them at any moment, and any page may be one that
 * the kernel cannot touch (FAULTS). The walk ends at the first such entry.
 *
 * Proves, for every interleaving of the steps below and within the bounds of the configuration: the survivor's wait ends; if
 * what cannot be touched is a neighbour's page, it ends by the mark, before the kernel frees the dead process's memory; what
 * was published before the death is read first; an end in good order is told as such; a successor's life is not lost, whatever
 * was lost before. A sleep for ever is an invalid end state.
 *
 * Does not prove the memory orders: each is seq_cst. The ring is one counter here; queue.pml has the rest of it.
 *
 * Each statement is one access to shared memory, or to the survivor's own words, which two of its threads share. The mutants are
 * made by tests/csrc/test_model.py, which replaces lines of this file.
 */
#ifndef ENTRIES
#define ENTRIES 2
#endif
#ifndef FAULTS
#define FAULTS 0 /* 1: the kernel may be unable to touch the survivor's page, too */
#endif
#ifndef NEIGHBOUR
#define NEIGHBOUR 1 /* a neighbour truncates its queue, which the dying process has an entry in */
#endif
#ifndef RELEASES
#define RELEASES 0 /* 1: the peer may leave in good order instead of dying */
#endif
#ifndef HEIRS
#define HEIRS 0 /* 1: a successor takes the role over, and writes */
#endif

#define TID 1 /* a life word */
#define HEIR 2
#define RELEASED 3
#define DEAD 4

byte life = TID;        /* entry 0: shared with the survivor */
bit truncated;          /* the neighbour's page */
bit faulty;             /* the survivor's page, for this walk */
byte counter;           /* what was published */
bit is_locked = 1;      /* the role's lock, or the socket that only the peer has */

/* The survivor's process. */
byte ended;             /* a counter: changed by each loss, never back */
byte lost_life;
byte word;              /* the wait word: changed by each wake */
bit asleep;             /* on all three words */
bit closed;             /* what the kernel tells the life thread */

/* Not in any memory: what the model knows. */
bit freed, told, good_order;
byte last_words;
bit heir_came;

inline wake() { asleep = 0 }

/* ---- the peer ------------------------------------------------------------------------------------------------------ */

proctype peer() {
    byte entry;
    if
    :: counter = 1; word++; wake()
    :: counter = 1 /* killed before its wake */
    :: true
    fi;
    last_words = counter;
    if
    :: RELEASES ->
        good_order = 1;
        atomic { life = RELEASED; wake() }; /* pairs: DEAD */
        is_locked = 0;
        closed = 1;
        goto end
    :: true
    fi;
    /* Killed. The kernel walks the list in its order. */
    if
    :: FAULTS -> faulty = 1
    :: true
    fi;
    entry = 0;
    do
    :: entry == ENTRIES -> break
    :: entry < ENTRIES && entry == 0 ->
        if
        :: faulty -> break
        :: else -> atomic { life = DEAD; wake() }; entry++ /* pairs: DEAD */
        fi
    :: entry < ENTRIES && entry > 0 ->
        if
        :: entry == ENTRIES - 1 && truncated -> break
        :: else -> entry++
        fi
    od;
    freed = 1;
    closed = 1; /* the event comes some instructions before the lock is dropped */
    is_locked = 0;
end:
    if
    :: HEIRS ->
        atomic { !is_locked -> is_locked = 1 };
        heir_came = 1;
        life = HEIR;
        wake(); /* fmq_life_hold */
        word++; wake(); /* greet_peer */
        counter = HEIRS + 1;
        word++; wake()
    :: !HEIRS
    fi
}

proctype neighbour() { truncated = 1 }

/* ---- the survivor's life thread -------------------------------------------------------------------------------------- */

inline lose() {
    lost_life = seen;
    ended++;
    wake()
}

proctype life_thread() {
    byte seen, looks;
    closed;
    looks = 2;
    do
    :: looks == 0 -> break
    :: looks > 0 ->
        if
        :: looks == 1 -> freed && !is_locked || good_order || heir_came /* the second look: long after the event */
        :: else
        fi;
        looks--;
        if
        :: is_locked -> skip
        :: else ->
            seen = life;
            if
            :: (seen == TID || seen == HEIR) && !is_locked && life == seen -> lose()
            :: else
            fi
        fi
    od
}

/* ---- the survivor's sleeper ------------------------------------------------------------------------------------------ */

proctype sleeper() {
    byte saw_ended, saw_life, saw_word;
    do
    :: true ->
        saw_ended = ended;
        saw_life = life; /* pairs: DEAD */
        saw_word = word; /* pairs: SLEEP */
        if
        :: counter > HEIRS -> break /* all has arrived */
        :: else
        fi;
        /* then what was lost */
        if
        :: saw_life == DEAD || saw_life == RELEASED || saw_ended && saw_life == lost_life ->
            assert(saw_life != RELEASED || good_order);
            assert(!good_order || saw_life == RELEASED);
            assert(saw_life != HEIR);
            assert(last_words <= counter);
            assert(HEIRS || counter == 0);
            assert(!freed || FAULTS || saw_life == DEAD || saw_life == RELEASED);
            if
            :: HEIRS -> heir_came; /* it waits again, for the successor */
                life == HEIR
            :: else -> told = 1; break
            fi
        :: else ->
            d_step {
                asleep = (ended == saw_ended && life == saw_life && word == saw_word)
            };
            !asleep
        fi
    od
}

init {
    atomic {
        run peer();
        if
        :: NEIGHBOUR -> run neighbour()
        :: !NEIGHBOUR
        fi;
        run life_thread();
        run sleeper()
    }
}
