/* The unsynchronized flavour: a writer that never waits, readers that are overrun, a writer that may be killed, its
 * heir.
 *
 * Proves, for every interleaving of the steps below and within the bounds of the configuration: what a reader
 * delivers is never torn and is the element with the number that it expected, also when a writer was killed half
 * way and another goes on; head <= begin <= head + one transfer; begin and head never go back; no wake-up is lost,
 * though all readers share one wait word, a reader is stopped, or the writer is killed anywhere (a sleep for ever
 * is an invalid end state).
 *
 * Does not prove the memory orders. Spin's memory is sequentially consistent; ../README.md argues the orders edge
 * by edge. What a weaker order would permit is here as a mutant: "announces the writing after it" and "publishes
 * before it writes" are the writer's stores in the other order, "looks at begin before it copies" the reader's
 * loads.
 *
 * Each statement is one access to shared memory; a slot's words are written and read one by one. The mutants are
 * made by tests/csrc/test_model.py, which replaces lines of this file.
 */
#ifndef CAPACITY
#define CAPACITY 2
#endif
#ifndef ELEMENTS
#define ELEMENTS 4 /* that are written in all */
#endif
#ifndef WORDS
#define WORDS 2 /* of an element */
#endif
#ifndef MOST
#define MOST 2 /* elements in one transfer */
#endif
#ifndef READERS
#define READERS 1 /* 1 or 2 */
#endif
#ifndef DEATHS
#define DEATHS 1 /* of the writer, at most */
#endif
#ifndef HEIRS
#define HEIRS 1 /* processes that take over the writer's role, at most */
#endif
#ifndef STOPS
#define STOPS 0 /* 1: another thread of reader 0 calls fmq_stop */
#endif
#ifndef NEW_TID
#define NEW_TID 1 /* 0: an heir's life thread has the number of the dead one, as may be in another pid namespace */
#endif

/* a life word */
#define NOBODY 0
#define DEAD 2
#define TID 3
#define alive (life >= TID)

/* a result */
#define OK 0
#define EAGAIN 1
#define EPIPE 2
#define ECANCELED 3
#define OVERRUN 4

/* The control block and the ring. */
byte begin;             /* elements whose writing was begun */
byte head;              /* elements that were written */
byte data_wait;         /* for all readers: odd while one has announced a sleep; never the same twice */
byte life;              /* the writer's */
byte ring[CAPACITY * WORDS]; /* each word of element p holds p + 1 */

/* The kernel's futex queues, one bit for each reader; futex_waitv queues its caller on two words. */
byte on_wait, on_life;

/* Private to a reader's process, but seen by another of its threads. */
bit busy[READERS], stopped[READERS];

/* Not in any memory: what the model knows. */
bit killed, dying, gone; /* the writer */
bit stopping;           /* until the stop is over the last element is not written: nothing else wakes the stopped */
bit told;               /* the first death was announced, */
byte last_words;        /* and this was head then */
byte deaths, heirs;     /* that may still be */

#define word_at(p) ring[((p) * WORDS + i) % (CAPACITY * WORDS)]

/* ---- the kernel's futexes ---------------------------------------------------------------------------------------- */

#define me_bit (1 << me)

inline futex_wake_all(queue) { queue = 0 }

inline futex_wake_one(queue) {
    atomic {
        if
        :: queue & 1 -> queue = queue & ~1
        :: queue & 2 -> queue = queue & ~2
        :: else
        fi
    }
}

inline futex_wait_either() {
    d_step {
        if
        :: data_wait == announced && life == seen_life -> on_wait = on_wait | me_bit; on_life = on_life | me_bit
        :: else
        fi
    };
    atomic { !(on_wait & on_life & me_bit) -> on_wait = on_wait & ~me_bit; on_life = on_life & ~me_bit }
}

/* ---- the writer -------------------------------------------------------------------------------------------------- */

inline put() {
    d_step { /* a dead writer may have begun more than we do */
        assert(begin >= position && begin - position <= MOST);
        begin = (begin > position + n -> begin : position + n) /* pairs: BEGIN */
    };
    i = 0;
    do
    :: i < n * WORDS -> d_step { word_at(position) = position + i / WORDS + 1; i++ }
    :: else -> break
    od;
    i = 0;
    d_step { position = position + n; n = 0 };
    d_step { assert(position > head && position <= begin); head = position } /* pairs: VISIBLE, pairs: SLEEP */
}

inline wake_readers() {
    if
    :: data_wait % 2 -> /* pairs: SLEEP */
        data_wait++; /* one publisher: even now */
        futex_wake_all(on_wait)
    :: else
    fi
}

proctype writer() {
    byte position, n, i, tid = TID;
take_role:
    {
        life = tid;
        futex_wake_all(on_life);
        position = head;
        /* Without asking: a writer that was killed before its futex call leaves sleepers on a word that says even. */
        data_wait = data_wait + 2;
        futex_wake_all(on_wait);
        do
        :: position == ELEMENTS -> break
        :: else ->
            if
            :: n = 1
            :: MOST > 1 && position + MOST <= ELEMENTS -> n = MOST
            fi;
            position + n < ELEMENTS || !stopping;
            put();
            wake_readers()
        od
    } unless { killed }
    atomic {
        !dying;
        position = 0; n = 0; i = 0;
        if
        :: killed && heirs > 0 -> heirs--; killed = 0; tid = tid + NEW_TID; goto take_role
        :: else -> gone = 1
        fi
    }
}

/* The kernel marks the life word of a dying process and wakes one sleeper. Its threads stop before or after that. */
inline mark_word() {
    d_step {
        if
        :: alive ->
            marked = 1;
            if
            :: !told -> told = 1; last_words = head
            :: else
            fi;
            life = DEAD /* pairs: DEAD */
        :: else
        fi
    };
    if
    :: marked -> futex_wake_one(on_life); marked = 0
    :: else
    fi
}

proctype kernel() {
    bit marked;
    do
    :: atomic { deaths > 0 && life != NOBODY && !gone && !killed -> deaths--; dying = 1 };
        if
        :: killed = 1; mark_word()
        :: alive -> mark_word(); killed = 1
        fi;
        dying = 0
    :: deaths == 0 || gone -> break
    od
}

/* ---- a reader ---------------------------------------------------------------------------------------------------- */

inline ring_need() {
    d_step { seen = head; r = (seen - position >= n -> OK : EAGAIN) } /* pairs: VISIBLE, pairs: SLEEP */
}

inline sleep_turn() {
    seen_life = life; /* pairs: DEAD */
    d_step { data_wait = data_wait | 1; announced = data_wait }; /* pairs: SLEEP */
    ring_need();
    if
    :: r == EAGAIN ->
        d_step { r = (stopped[me] -> ECANCELED : (seen_life == DEAD -> EPIPE : EAGAIN)) } /* pairs: STOP */
    :: else
    fi;
    if
    :: r == EAGAIN ->
        futex_wait_either();
        if /* pass_on_death */
        :: life == DEAD -> futex_wake_all(on_life) /* pairs: DEAD */
        :: else
        fi;
        ring_need()
    :: else
    fi;
    d_step { seen_life = 0; announced = 0 }
}

inline wait_for() {
    ring_need();
    do
    :: r == EAGAIN -> sleep_turn()
    :: else -> break
    od
}

/* ring_still_whole; after an overrun the reader goes on at the middle of the ring or at the oldest whole element */
inline check_begin() {
    d_step { seen_begin = begin; r = (begin - position > CAPACITY -> OVERRUN : OK) }; /* pairs: BEGIN */
    if
    :: r == OVERRUN ->
        d_step {
            seen = head;
            assert(seen_begin <= seen || seen_begin - seen <= CAPACITY);
            seen_begin = seen_begin - CAPACITY;
            resume = (seen > CAPACITY / 2 -> seen - CAPACITY / 2 : 0);
            resume = (resume < seen_begin -> seen_begin : resume);
            assert(resume > position && resume <= seen)
        }
    :: else
    fi
}

inline get() {
    check_begin();
    if
    :: r == OK ->
        i = 0;
        do
        :: i < n * WORDS -> d_step { got[i] = word_at(position); i++ }
        :: else -> break
        od;
        i = 0;
        check_begin()
    :: else
    fi
}

inline deliver() {
    atomic {
        seen_begin = 0;
        do
        :: i < n * WORDS ->
            assert(r == OVERRUN || got[i] == position + i / WORDS + 1);
            got[i] = 0;
            i++
        :: else -> break
        od;
        i = 0;
        position = (r == OVERRUN -> resume : position + n);
        resume = 0
    }
}

proctype reader(byte me) {
    byte position, seen, n, r, i, seen_life, announced, seen_begin, resume;
    byte got[MOST * WORDS];
    do
    :: position == ELEMENTS -> break
    :: else ->
        if
        :: n = 1
        :: MOST > 1 && position + MOST <= ELEMENTS -> n = MOST
        fi;
        busy[me] = 1; /* pairs: STOP */
        if
        :: stopped[me] -> r = ECANCELED
        :: else -> wait_for()
        fi;
        if
        :: r == OK -> get(); deliver()
        :: else
        fi;
        busy[me] = 0; /* pairs: STOP */
        if
        :: r == ECANCELED -> break
        :: r == EPIPE ->
            assert(seen >= last_words);
            if
            :: gone && head == position -> break
            :: gone && head > position /* what the last heir wrote since, or less than n */
            :: alive
            fi
        :: else
        fi;
        d_step { n = 0; r = 0; seen = 0 }
    od
}

/* Wakes again and again, without changing the word, because other readers may sleep on it. */
proctype stopper() {
    stopped[0] = 1; /* pairs: STOP */
    do
    :: futex_wake_all(on_wait);
        if
        :: !busy[0] -> break /* pairs: STOP */
        :: else
        fi
    od;
    stopping = 0
}

init {
    atomic {
        byte who;
        /* As often, or less often: a sleep that nothing but a death could end is a lost wake-up. */
        select(deaths : 0 .. DEATHS);
        select(heirs : 0 .. HEIRS);
        if
        :: deaths > 0 -> run kernel()
        :: else
        fi;
        if
        :: STOPS > 0 -> run stopper()
        :: STOPS > 0 -> run stopper(); stopping = 1
        :: true
        fi;
        run writer();
        for (who : 0 .. READERS - 1) { run reader(who) }
    }
}
