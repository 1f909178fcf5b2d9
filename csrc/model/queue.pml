/* The synchronized queue: one writer, one reader, their sleeps, their deaths and their heirs. Checked by Spin.
 *
 * Proves, for every interleaving of the steps below and within the bounds of the configuration: no element is lost,
 * doubled, torn or reordered; 0 <= head - tail <= capacity; what was published before a death or a release is read
 * before it is told; a stopped end rests; no wake-up is lost, whichever process is killed where (a process that sleeps for
 * ever is an invalid end state); the watcher of a life word is told; the bell of the bridge rings when there is
 * reason to, and nothing of a bell that was taken back is touched any more.
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
#ifndef MORTAL
#define MORTAL 3 /* the side that a death may hit: the writer (1), the reader (2), either (3) */
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
#define WATCHERS 0 /* the bridge of the reader's process watches the writer's life word (1), till it is told not to (2) */
#endif
#ifndef BELLS
#define BELLS 0 /* how often the reader hangs a bell on its end (fmq_bridge) instead of waiting itself */
#endif
#ifndef NEW_TID
#define NEW_TID 1 /* 0: an heir's life thread has the number of the dead one, as may be in another pid namespace */
#endif

#define WRITER 0
#define READER 1
#define PEER (1 - me)

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
/* space_wait, data_wait: each side's own. A word that counts never returns to a value, so of its value only two things
 * are needed: whether it is odd, and whether it is still what a sleeper made of it. */
bit is_odd[2];
bit as_announced[2], as_bell_announced;
byte life[2];
byte ring[CAPACITY * WORDS]; /* each word of element p holds p + 1 */

/* The kernel's futex queues: who is queued on which word. futex_waitv queues its caller on two words. */
bit on_wait[2];         /* the side, on its own wait word */
bit on_life[2];         /* the side, on its peer's life word */
bit bell_on_wait, bell_on_life, bridge_on_doorbell; /* a thread of the reader's process */

/* Private to a side's process, but seen by another of its threads. */
bit busy[2], stopped[2];
byte doorbell, heard;   /* the bridge's: moved by every change of its table; what it was when the thread last read that */
bit table_locked;
bit bell_hangs;         /* the one bell: on the reader's end (BELLS), or on the writer's life alone (WATCHERS) */
bit bell_rang;          /* its eventfd, or its socket */
byte bell_target;

/* Not in any memory: what the model knows. */
bit killed[2];          /* runs no more */
bit dying[2];           /* the kernel is not yet through with it */
bit closing[2];         /* the role is being released, by the side itself or fmq_stop's caller */
bit stopping[2];        /* fmq_stop's caller is at it, */
bit patient;            /* and the other side does nothing in the meantime that could wake the one to be stopped */
bit rests[2];           /* fmq_stop has returned */
bit gone[2];            /* no process has the role, or ever will */
bit told[2];            /* the first death or release of the role was announced, */
byte last_words[2];     /* and this was the counter then */
bit reader_died, closer_runs;
byte deaths, heirs, timeouts, bells; /* that may still be */

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
inline futex_wake_wait(role) {
    d_step { on_wait[role] = 0; bell_on_wait = (role == READER -> 0 : bell_on_wait) }
}
inline futex_wake_life_all(role) {
    d_step {
        on_life[1 - role] = 0;
        bell_on_life = (role == WRITER -> 0 : bell_on_life)
    }
}
inline futex_wake_life_one(role) {
    atomic {
        if
        :: on_life[1 - role] -> on_life[1 - role] = 0
        :: role == WRITER && bell_on_life -> bell_on_life = 0
        :: else
        fi
    }
}

inline futex_wait_either() {
    d_step {
        if
        :: as_announced[me] && life[PEER] == seen_life -> on_wait[me] = 1; on_life[me] = 1
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

/* ---- sleep and wake (sleep.c) ------------------------------------------------------------------------------------ */

inline count(role) {
    as_announced[role] = 0;
    as_bell_announced = (role == READER -> 0 : as_bell_announced)
}

inline wake_peer() {
    if
    :: is_odd[PEER] -> /* pairs: SLEEP */
        d_step { is_odd[PEER] = 0; count(PEER) }; /* + 1, and one publisher: even now */
        futex_wake_wait(PEER)
    :: else
    fi
}

/* Without asking: a publisher that was killed before its futex call leaves sleepers on a word that says even. */
inline greet_peer() {
    d_step { count(PEER) }; /* + 2 */
    futex_wake_wait(PEER)
}


inline pass_on_death(role) {
    if
    :: life[role] == DEAD -> futex_wake_life_all(role) /* pairs: DEAD */
    :: else
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
    d_step { is_odd[me] = 1; as_announced[me] = 1 }; /* pairs: SLEEP */
    ring_need();
    if
    :: r == EAGAIN -> ended()
    :: else
    fi;
    if
    :: r == EAGAIN ->
        futex_wait_either();
        pass_on_death(PEER);
        ring_need();
        if
        :: r == EAGAIN && timed_out -> r = ETIMEDOUT
        :: else
        fi
    :: else
    fi;
    d_step { seen_life = 0; as_announced[me] = 0; timed_out = 0 }
}

inline wait_for() {
    ring_need();
    do
    :: r == EAGAIN && !at_once -> sleep_turn()
    :: else -> break
    od
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
    busy[me] = 0 /* pairs: STOP */
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
        as_announced[role] = 0;
        if
        :: role == READER ->
            reader_died = 1;
            as_bell_announced = 0;
            bell_on_wait = 0; bell_on_life = 0; bridge_on_doorbell = 0;
            doorbell = 0; heard = 0; table_locked = 0; bell_hangs = 0; bell_rang = 0; bell_target = 0;
            closer_runs = 0; bells = 0
        :: else
        fi
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

#define can_die(role) (MORTAL & (1 << role) && life[role] != NOBODY && !gone[role] && !killed[role])

proctype kernel() {
    byte role;
    bit marked;
    do
    :: atomic {
        deaths > 0 ->
            if
            :: can_die(WRITER) -> role = WRITER
            :: can_die(READER) -> role = READER
            :: (gone[WRITER] || !(MORTAL & 1)) && (gone[READER] || !(MORTAL & 2)) -> break
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

/* ---- bells (bridge.c) ------------------------------------------------------------------------------------------- */

/* What is done to the table under its mutex is one step: no other process sees it half done. */
inline change_table(hangs) {
    bell_hangs = hangs;
    doorbell++;
    bridge_on_doorbell = 0
}

/* From the return on the bridge sleeps on nothing of this bell. It may have taken the kernel's one wake for it. */
inline unhang() {
    atomic {
        !table_locked;
        if
        :: bell_hangs -> change_table(0); rung = doorbell
        :: else
        fi
    };
    if
    :: rung ->
        heard >= rung; /* pairs: HEARD */
        assert(!bell_on_wait && !bell_on_life);
        pass_on_death(WRITER);
        rung = 0
    :: else
    fi
}

/* The end awaits its bell, or goes on: then it may transfer without waiting, or take the bell back and wait itself. */
inline hang() {
    bells--;
    d_step { /* is_over */
        at_once = life[PEER] == DEAD || life[PEER] == RELEASED || counter[PEER] >= position + n
    };
    if
    :: at_once
    :: else ->
        atomic { !table_locked -> bell_target = position + n; bell_rang = 0; change_table(1) };
        if
        :: true -> bell_rang /* for ever, when it does not ring */
        :: true
        fi;
        at_once = 1
    fi
}

#define bell_has_wait (BELLS > 0)
#define arrived (counter[WRITER] >= bell_target)

/* The bridge's thread, in the reader's process: a second sleeper on the same words. */
proctype bridge() {
    byte rung, seen_life;
    bit hung;
    {
        do
        :: atomic { !table_locked -> table_locked = bell_hangs; rung = doorbell; hung = bell_hangs };
            if
            :: hung ->
                seen_life = life[WRITER]; /* pairs: DEAD */
                if
                :: bell_has_wait -> d_step { is_odd[READER] = 1; as_bell_announced = 1 } /* pairs: SLEEP */
                :: else
                fi;
                if
                :: seen_life == DEAD || bell_has_wait && (seen_life == RELEASED || arrived) -> /* pairs: SLEEP */
                    if
                    :: seen_life == DEAD -> futex_wake_life_all(WRITER)
                    :: else
                    fi;
                    d_step { bell_rang = bell_has_wait; bell_hangs = 0; hung = 0; bell_target = 0; as_bell_announced = 0 }
                :: else
                fi
            :: else
            fi;
            d_step { table_locked = 0; heard = rung }; /* pairs: HEARD */
            d_step {
                if
                :: doorbell == rung && !hung -> bridge_on_doorbell = 1
                :: doorbell == rung && hung && life[WRITER] == seen_life && as_bell_announced == bell_has_wait ->
                    bridge_on_doorbell = 1; bell_on_life = 1; bell_on_wait = bell_has_wait
                :: else
                fi
            };
            if
            :: atomic { !bridge_on_doorbell || hung && (!bell_on_life || bell_has_wait && !bell_on_wait) ->
                bridge_on_doorbell = 0; bell_on_life = 0; bell_on_wait = 0;
                rung = 0; seen_life = 0; as_bell_announced = 0; hung = 0 }
            :: gone[WRITER] && gone[READER] && !closer_runs && !(bell_hangs && life[WRITER] == DEAD) -> break
            fi
        od
    } unless { reader_died }
}

/* Another thread of the reader's process, which takes the watch down some time. */
proctype closer() {
    byte rung;
    {
        unhang();
        closer_runs = 0
    } unless { reader_died }
}

/* ---- a side, and those who inherit its role ---------------------------------------------------------------------- */

proctype side(byte me) {
    byte position, seen, n, seen_life, r, i, tid = TID, rung;
    bit timed_out, at_once;
take_role:
    {
        life[me] = tid;
        futex_wake_life_all(me);
        position = counter[me];
        ring_look();
        greet_peer();
        do
        :: me == WRITER && position == ELEMENTS -> break
        :: else ->
            !(patient && stopping[PEER]);
            if
            :: n = 1
            :: me == READER && MOST_READ > 1 -> n = MOST_READ
            :: me == WRITER && MOST_WRITTEN > 1 && position + MOST_WRITTEN <= ELEMENTS -> n = MOST_WRITTEN
            fi;
again:      if
            :: me == READER && bells > 0 -> hang()
            :: me == WRITER || BELLS == 0 || !bell_hangs
            :: me == READER && BELLS > 0 && bell_hangs -> unhang()
            fi;
            transfer();
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
            fi;
            at_once = 0
        od;
        assert(me == WRITER || BELLS == 0 || !bell_hangs);
        !(patient && stopping[PEER]);
        if
        :: atomic { !closing[me] -> closing[me] = 1 }; release(me)
        :: else -> life[me] == RELEASED
        fi
    } unless { killed[me] }
    atomic {
        !dying[me] && !stopping[me];
        position = 0; seen = 0; n = 0; seen_life = 0; r = 0; i = 0; timed_out = 0; at_once = 0; rung = 0;
        if
        :: heirs > 0 && (life[me] == DEAD || killed[me] || rests[me]) ->
            heirs--; tid = tid + NEW_TID;
            killed[me] = 0; closing[me] = 0; rests[me] = 0; stopped[me] = 0; busy[me] = 0;
            goto take_role
        :: else -> gone[me] = 1
        fi
    }
}

/* Another thread of one side's process: fmq_stop, then the release. Wakes again and again, without a change. */
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
        do
        :: futex_wake_wait(role);
            if
            :: !busy[role] -> break /* pairs: STOP */
            :: else
            fi
        od;
        rests[role] = 1;
        release(role)
    } unless { killed[role] }
    stopping[role] = 0;
end:
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
        :: WATCHERS == 1 -> bell_hangs = 1; run bridge()
        :: WATCHERS == 2 -> bell_hangs = 1; run bridge(); run closer(); closer_runs = 1
        :: BELLS > 0 -> bells = BELLS; run bridge()
        :: else
        fi;
        run side(WRITER);
        run side(READER)
    }
}

#ifdef LIVENESS
/* Under weak fairness, which is that a process that can go on for ever does go on. */
ltl ends { <> (gone[WRITER] && gone[READER]) }
#endif
