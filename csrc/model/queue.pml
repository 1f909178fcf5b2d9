/* The synchronized queue: one writer, one reader, their sleeps, their deaths and their heirs. Checked by Spin.
 *
 * Proves, for every interleaving of the steps below and within the bounds of the configuration: no element is lost,
 * doubled, torn or reordered; 0 <= head - tail <= capacity; what was published before a death or a release is read
 * before it is told; a stopped end rests; no wake-up is lost, whoever is killed where (a process that sleeps for
 * ever is an invalid end state); the watcher of a life word is told.
 *
 * Does not prove the memory orders. Spin's memory is sequentially consistent; ../README.md argues the orders edge
 * by edge. What a weaker order would permit is here as a mutant: "looks before it announces" and "wakes before it
 * publishes" are the store and the load of SLEEP in the other order, "publishes before it copies" is VISIBLE
 * without its release.
 *
 * Each statement is one access to shared memory, and the other processes may run, or this one be killed, before
 * each. The mutants are made by tests/csrc/test_model.py, which replaces lines of this file.
 */
#ifndef CAPACITY
#define CAPACITY 2
#endif
#ifndef ELEMENTS
#define ELEMENTS 3 /* that the writer writes in all */
#endif
#ifndef WORDS
#define WORDS 1 /* of an element; each is copied by itself */
#endif
#ifndef MOST_WRITTEN
#define MOST_WRITTEN 2 /* elements in one transfer; with MOST_READ at most CAPACITY + 1, or both could wait for ever */
#endif
#ifndef MOST_READ
#define MOST_READ 1
#endif
#ifndef DEATHS
#define DEATHS 1 /* of either side, at most */
#endif
#ifndef HEIRS
#define HEIRS 1 /* processes that take over a role, at most */
#endif
#ifndef STOPS
#define STOPS 0 /* fmq_stop and release by another thread of the writer (1), the reader (2), either (3) */
#endif
#ifndef TIMEOUTS
#define TIMEOUTS 0 /* sleeps that end by themselves, at most */
#endif
#ifndef WATCHERS
#define WATCHERS 0 /* 1: a thread of the reader's process watches the writer's life word (watch.c) */
#endif
#ifndef NEW_TID
#define NEW_TID 1 /* 0: an heir's life thread has the number of the dead one, as may be in another pid namespace */
#endif

#define WRITER 0
#define READER 1
#define PEER (1 - me)
#define AWAKE 0
#define ASLEEP 1

/* a life word */
#define NOBODY 0
#define RELEASED 1
#define DEAD 2
#define TID 3
#define alive(role) (life[role] >= TID)

/* a result */
#define OK 0
#define EAGAIN 1
#define EPIPE 2
#define ESHUTDOWN 3
#define ECANCELED 4
#define ETIMEDOUT 5

/* The control block and the ring. */
byte counter[2];        /* head, tail */
bit wait_word[2];       /* space_wait, data_wait: each side's own */
byte life[2];
byte ring[CAPACITY * WORDS]; /* each word of element p holds p + 1 */

/* The kernel's futex queues: who is queued on which word. futex_waitv queues its caller on two words. */
bit on_wait[2];         /* the side, on its own wait word */
bit on_life[2];         /* the side, on its peer's life word */
bit watcher_on_life;

/* Private to a side's process, but seen by another of its threads. */
bit busy[2], stopped[2];

/* Not in any memory: what the model knows. */
bit killed[2];          /* runs no more */
bit dying[2];           /* the kernel is not yet through with it */
bit closing[2];         /* somebody releases the role: the side itself or fmq_stop's caller */
bit stopping[2];        /* fmq_stop's caller is at it, */
bit patient;            /* and the other side does nothing in the meantime that could wake the one to be stopped */
bit rests[2];           /* fmq_stop has returned */
bit gone[2];            /* nobody has the role, or ever will */
bit told[2];            /* the first death or release of the role was announced, */
byte last_words[2];     /* and this was the counter then */
bit reader_died;
byte deaths, heirs, timeouts; /* that may still be */

/* ---- the ring (ring.c) ------------------------------------------------------------------------------------------- */

#define known (me == WRITER -> CAPACITY - (position - seen) : seen - position)

inline ring_look() {
    seen = counter[PEER]; /* pairs: VISIBLE, pairs: SLEEP */
    assert(me == WRITER || seen >= position && seen - position <= CAPACITY);
    assert(me == READER || position >= seen && position - seen <= CAPACITY)
}

inline ring_need() {
    d_step {
        if
        :: known >= n
        :: else -> ring_look()
        fi;
        r = (known >= n -> OK : EAGAIN)
    }
}

#define word_at ring[(position * WORDS + i) % (CAPACITY * WORDS)]

inline ring_copy() {
    i = 0;
    do
    :: i < n * WORDS ->
        d_step {
            if
            :: me == WRITER -> word_at = position + i / WORDS + 1
            :: me == READER -> assert(word_at == position + i / WORDS + 1)
            fi;
            i++
        }
    :: else -> break
    od
}

inline ring_publish() {
    d_step { position = position + n; n = 0; i = 0 };
    d_step { assert(!rests[me]); counter[me] = position } /* pairs: VISIBLE, pairs: SLEEP */
}

/* ---- the kernel's futexes (futex.c) ------------------------------------------------------------------------------ */

/* A wake takes a queued caller off the word. One that was queued on two words may so take a wake from each. */
inline futex_wake_wait(role) { on_wait[role] = 0 }
inline futex_wake_life_all(role) {
    d_step {
        on_life[1 - role] = 0;
        watcher_on_life = (role == WRITER -> 0 : watcher_on_life)
    }
}
inline futex_wake_life_one(role) {
    atomic {
        if
        :: on_life[1 - role] -> on_life[1 - role] = 0
        :: role == WRITER && watcher_on_life -> watcher_on_life = 0
        :: else
        fi
    }
}

inline futex_wait_either() {
    d_step {
        if
        :: wait_word[me] == ASLEEP && life[PEER] == seen_life -> on_wait[me] = 1; on_life[me] = 1
        :: else
        fi
    };
    atomic {
        if
        :: !on_wait[me] || !on_life[me]
        :: timeouts > 0 && on_wait[me] && on_life[me] -> timeouts--; timed_out = 1
        fi;
        on_wait[me] = 0;
        on_life[me] = 0
    }
}

/* ---- sleep and wake (queue.c) ------------------------------------------------------------------------------------ */

inline wake_peer() {
    if
    :: wait_word[PEER] == AWAKE /* pairs: SLEEP */
    :: else ->
        d_step { was = wait_word[PEER]; wait_word[PEER] = AWAKE };
        if
        :: was == ASLEEP -> futex_wake_wait(PEER)
        :: else
        fi
    fi
}

inline ended() {
    d_step {
        if
        :: stopped[me] -> r = ECANCELED /* pairs: STOP */
        :: else -> r = (seen_life == DEAD -> EPIPE : (seen_life == RELEASED -> ESHUTDOWN : EAGAIN))
        fi
    }
}

inline sleep_turn() {
    seen_life = life[PEER]; /* pairs: DEAD */
    wait_word[me] = ASLEEP; /* pairs: SLEEP */
    ring_need();
    if
    :: r == EAGAIN -> ended()
    :: else
    fi;
    if
    :: r == EAGAIN ->
        futex_wait_either();
        ring_need();
        if
        :: r == EAGAIN && timed_out -> r = ETIMEDOUT
        :: else
        fi
    :: else
    fi
}

inline wait_for() {
    ring_need();
    if
    :: r == EAGAIN ->
        do
        :: r == EAGAIN -> sleep_turn()
        :: else -> break
        od;
        wait_word[me] = AWAKE;
        if
        :: life[PEER] == DEAD -> futex_wake_life_all(PEER) /* pairs: DEAD */
        :: else
        fi
    :: else
    fi;
    d_step { seen_life = 0; timed_out = 0 }
}

inline transfer() {
    busy[me] = 1; /* pairs: STOP */
    if
    :: stopped[me] -> r = ECANCELED
    :: else ->
        wait_for();
        if
        :: r == OK ->
            ring_copy();
            ring_publish();
            wake_peer()
        :: else
        fi
    fi;
    d_step { busy[me] = 0; was = 0 } /* pairs: STOP */
}

inline note_last_words(role) {
    if
    :: !told[role] -> told[role] = 1; last_words[role] = counter[role]
    :: else
    fi
}

/* ---- life words (life.c) ----------------------------------------------------------------------------------------- */

/* One system call changes the word and wakes. */
inline release(role) {
    atomic {
        note_last_words(role);
        life[role] = RELEASED; /* pairs: DEAD */
        futex_wake_life_all(role)
    }
}

/* The kernel marks the words of a dying process and wakes one sleeper. Its threads stop before or after that. */
inline stop_threads(role) {
    d_step {
        killed[role] = 1;
        on_wait[role] = 0;
        on_life[role] = 0;
        reader_died = reader_died || role == READER
    }
}
inline mark_word(role) {
    d_step {
        if
        :: alive(role) -> note_last_words(role); life[role] = DEAD; marked = 1 /* pairs: DEAD */
        :: else
        fi
    };
    if
    :: marked -> futex_wake_life_one(role); marked = 0
    :: else
    fi
}

#define can_die(role) (life[role] != NOBODY && !gone[role] && !killed[role])

proctype kernel() {
    byte role;
    bit marked;
    do
    :: atomic {
        deaths > 0 ->
            if
            :: can_die(WRITER) -> role = WRITER
            :: can_die(READER) -> role = READER
            :: gone[WRITER] && gone[READER] -> break
            fi;
            dying[role] = 1; deaths-- };
        if
        :: stop_threads(role); mark_word(role)
        :: alive(role) -> mark_word(role); stop_threads(role)
        fi;
        d_step { dying[role] = 0; role = 0 }
    :: deaths == 0 -> break
    od
}

/* ---- a side, and those who inherit its role ---------------------------------------------------------------------- */

proctype side(byte me) {
    byte position, seen, n, seen_life, r, i, tid = TID;
    bit was, timed_out;
take_role:
    {
        life[me] = tid;
        position = counter[me];
        ring_look();
        wait_word[me] = AWAKE;
        /* Without asking: one that was killed before its futex call leaves a sleeper on a word that says awake. */
        wait_word[PEER] = AWAKE;
        futex_wake_wait(PEER);
        do
        :: me == WRITER && position == ELEMENTS -> break
        :: else ->
            !(patient && stopping[PEER]);
            if
            :: n = 1
            :: me == READER && MOST_READ > 1 -> n = MOST_READ
            :: me == WRITER && MOST_WRITTEN > 1 && position + MOST_WRITTEN <= ELEMENTS -> n = MOST_WRITTEN
            fi;
again:      transfer();
            if
            :: r == ECANCELED -> break
            :: r == EPIPE || r == ESHUTDOWN ->
                if
                :: n > 1 && known > 0 -> n = 1; goto again
                :: else
                fi;
                assert(seen >= last_words[PEER]);
                if
                :: gone[PEER] -> break
                :: alive(PEER)
                fi
            :: else
            fi
        od;
        !(patient && stopping[PEER]);
        if
        :: atomic { !closing[me] -> closing[me] = 1 }; release(me)
        :: else -> life[me] == RELEASED
        fi
    } unless { killed[me] }
    atomic {
        !dying[me] && !stopping[me];
        position = 0; seen = 0; n = 0; seen_life = 0; r = 0; i = 0; was = 0; timed_out = 0;
        if
        :: heirs > 0 && (life[me] == DEAD || killed[me] || rests[me]) ->
            heirs--; tid = tid + NEW_TID;
            killed[me] = 0; closing[me] = 0; rests[me] = 0; stopped[me] = 0; busy[me] = 0;
            goto take_role
        :: else -> gone[me] = 1
        fi
    }
}

/* Another thread of one side's process: fmq_stop, then the release. The C code wakes again and again until nobody is
 * inside, for the sake of hostile peers; here it has to do with one wake. */
proctype stopper() {
    byte role;
    atomic {
        if
        :: STOPS & 1 && alive(WRITER) && !killed[WRITER] && !closing[WRITER] -> role = WRITER
        :: STOPS & 2 && alive(READER) && !killed[READER] && !closing[READER] -> role = READER
        :: gone[WRITER] && gone[READER] -> goto end
        fi;
        closing[role] = 1;
        stopping[role] = 1
    };
    {
        stopped[role] = 1; /* pairs: STOP */
        wait_word[role] = AWAKE;
        futex_wake_wait(role);
        !busy[role]; /* pairs: STOP */
        rests[role] = 1;
        release(role)
    } unless { killed[role] }
    stopping[role] = 0;
end:
}

/* watch.c, in the reader's process. */
proctype watcher() {
    byte seen_life;
    do
    :: !reader_died ->
        seen_life = life[WRITER]; /* pairs: DEAD */
        if
        :: seen_life == DEAD -> futex_wake_life_all(WRITER); break
        :: else
        fi;
        d_step {
            if
            :: life[WRITER] == seen_life -> watcher_on_life = 1
            :: else
            fi
        };
        if
        :: !watcher_on_life
        :: reader_died -> break
        :: gone[WRITER] && gone[READER] && life[WRITER] != DEAD -> break /* the watch is taken down */
        fi
    :: else -> break
    od
}

init {
    atomic {
        /* As often, or less often: a sleep that nothing but a death could end is a lost wake-up. */
        select(deaths : 0 .. DEATHS);
        select(heirs : 0 .. HEIRS);
        select(timeouts : 0 .. TIMEOUTS);
        if
        :: deaths > 0 -> run kernel()
        :: else
        fi;
        if
        :: STOPS > 0 -> run stopper()
        :: STOPS > 0 -> run stopper(); patient = 1
        :: true
        fi;
        if
        :: WATCHERS > 0 -> run watcher()
        :: else
        fi;
        run side(WRITER);
        run side(READER)
    }
}

#ifdef LIVENESS
/* Under weak fairness, which is that whoever can go on for ever does go on. */
ltl ends { <> (gone[WRITER] && gone[READER]) }
#endif
