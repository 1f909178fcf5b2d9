/* The broadcast queue: a writer that waits for the slowest living reader, and readers that join, read, leave and die. Checked by
 * Spin.
 *
 * Proves, for every interleaving of the steps below and within the bounds of the configuration: a reader gets every element from
 * where it joined, once, whole and in order, until it leaves, dies or is evicted; it is told that the writer has gone only after
 * all that; no process sleeps for ever (an invalid end state), so the writer never waits for a reader that has died, left
 * or been evicted, and no wake-up is lost.
 *
 * Does not prove the memory orders: each access is seq_cst, as in the C code, but for the elements, which a fence orders. A tail that
 * lies is not here (tests/csrc/hostile.c), nor a writer's heir, which begins by a look at all seats as this one does. That the writer
 * looks again once a second is not here either: nothing may depend on it.
 *
 * Each statement is one access to shared memory, and the other processes may run, or this one be killed, before each. The
 * mutants are made by tests/csrc/test_model.py, which replaces lines of this file.
 */
#ifndef CAPACITY
#define CAPACITY 1
#endif
#ifndef ELEMENTS
#define ELEMENTS 2 /* that the writer writes in all */
#endif
#ifndef MOST
#define MOST 1 /* elements in one write */
#endif
#ifndef MOST_READ
#define MOST_READ 1 /* 2: also all that there is */
#endif
#ifndef READERS
#define READERS 2 /* processes */
#endif
#ifndef SEATS
#define SEATS 2
#endif
#ifndef JOINS
#define JOINS 2 /* by all readers, at most */
#endif
#ifndef DEATHS
#define DEATHS 1 /* of readers, at most */
#endif
#ifndef WRITER_DIES
#define WRITER_DIES 0
#endif
#ifndef EVICTIONS
#define EVICTIONS 0 /* of any reader; and a reader may stop for ever, which is evicted */
#endif

#define NOBODY 0 /* a life word */
#define RELEASED 1
#define DEAD 2
#define TID 3

#define FREE 0 /* a seat's state: 4 * turn + one of these */
#define JOINING 1
#define TAKEN 2
#define phase(word) ((word) & 3)
#define turn_of(word) ((word) >> 2)

/* The control pages and the ring. */
byte head;
byte tail[SEATS], state[SEATS], life[SEATS], verdict[SEATS];
byte writer_life = TID;
byte ring[CAPACITY];    /* element p is p + 1 */
byte data_wait, space_wait, need;

/* The kernel's: locks, and who sleeps. The writer sleeps on space_wait and on lives, a reader on data_wait and the writer's life. */
bit locked[SEATS];
bit writer_asleep, writer_on_life[SEATS];
bit reader_asleep[READERS];

/* Of the writer's process. */
byte out[SEATS];        /* the turn that the writer does not count any more */
byte ended;             /* changed by an eviction */

/* Not in any memory: what the model knows. */
bit killed[READERS], writer_killed, over;
byte holds[READERS];    /* which seat's life word is a reader's: 1 + its number */
byte locks[READERS];    /* and which lock */
byte deaths, joins, evictions;
byte stopped;           /* in which seat a reader has stopped: 1 + its number */

/* ---- sleep and wake (sleep.c) --------------------------------------------------------------------------------------- */

inline wake_readers() { d_step { reader_asleep[0] = 0; reader_asleep[READERS - 1] = 0 } }
inline wake_life(k) {
    d_step {
        if
        :: writer_asleep && writer_on_life[k] -> writer_asleep = 0
        :: else
        fi
    }
}

/* ---- the writer (readers.c) ------------------------------------------------------------------------------------------- */

/* One seat: free, left or out; or dead, which makes it out; or it counts. */
inline look_at_seat(k) {
    seen_state = state[k]; /* pairs: SEAT */
    d_step { lives[k] = 0; at = position };
    if
    :: phase(seen_state) == FREE || out[k] == turn_of(seen_state) /* pairs: OUT */
    :: else ->
        seen_life = life[k]; /* pairs: DEAD */
        if
        :: seen_life == NOBODY || seen_life == RELEASED
        :: seen_life == DEAD ->
            verdict[k] = turn_of(seen_state); /* pairs: OUT */
            out[k] = turn_of(seen_state)
        :: else ->
            d_step {
                at = tail[k]; /* pairs: VISIBLE, SLEEP */
                lives[k] = seen_life;
                if
                :: position - at > CAPACITY ->
                    assert(phase(seen_state) == JOINING);
                    at = position - CAPACITY
                :: else
                fi;
                assert(at <= position)
            }
        fi
    fi;
    d_step { seen = (at < seen -> at : seen); seen_state = 0; seen_life = 0; at = 0 }
}

inline readers_look() {
    seen = position;
    look_at_seat(0);
    if
    :: SEATS > 1 -> look_at_seat(SEATS - 1)
    :: SEATS == 1
    fi
}

#define room (CAPACITY - (position - seen))

inline write_when_there_is_room() {
    if
    :: room < n || !has_looked -> readers_look(); has_looked = 1
    :: else
    fi;
    do
    :: room >= n -> break
    :: room < n ->
        saw_ended = ended;
        need = position + n - CAPACITY; /* pairs: SLEEP */
        d_step { space_wait = space_wait | 1; announced = space_wait }; /* pairs: SLEEP */
        readers_look();
        if
        :: room < n ->
            d_step { /* futex_waitv */
                writer_on_life[0] = lives[0] != 0;
                writer_on_life[SEATS - 1] = lives[SEATS - 1] != 0;
                writer_asleep = space_wait == announced && ended == saw_ended &&
                    (lives[0] == 0 || life[0] == lives[0]) && (lives[SEATS - 1] == 0 || life[SEATS - 1] == lives[SEATS - 1])
            };
            !writer_asleep;
            readers_look()
        :: else
        fi;
        d_step { saw_ended = 0; announced = 0 }
    od;
    do
    :: i < n -> d_step { ring[(position + i) % CAPACITY] = position + i + 1; i++ }
    :: else -> break
    od;
    atomic { position = position + n; i = 0 };
    head = position; /* pairs: VISIBLE, pairs: SLEEP */
    if
    :: data_wait & 1 -> data_wait++; wake_readers() /* pairs: SLEEP */
    :: else
    fi
}


proctype writer() {
    byte position, seen, n, i, seen_state, seen_life, at, announced, saw_ended;
    byte lives[SEATS];
    bit has_looked;
    {
        do
        :: position == ELEMENTS -> break
        :: position < ELEMENTS ->
            if
            :: n = 1
            :: MOST > 1 && position + MOST <= ELEMENTS -> n = MOST
            fi;
            write_when_there_is_room()
        od;
        atomic { writer_life = RELEASED; reader_asleep[0] = 0; reader_asleep[READERS - 1] = 0 } /* pairs: DEAD */
    } unless { writer_killed }
    over = 1
}

/* A thread of the writer's process: fmq_evict. */
proctype owner() {
    byte seat, turn;
    do
    :: evictions > 0 && !over || stopped ->
        atomic {
            if
            :: stopped -> seat = stopped - 1; stopped = 0
            :: evictions > 0 -> evictions--; seat = 0
            :: evictions > 0 -> evictions--; seat = SEATS - 1
            fi
        };
        turn = turn_of(state[seat]);
        if
        :: turn ->
            verdict[seat] = turn; /* pairs: OUT */
            out[seat] = turn;
            d_step { ended++; writer_asleep = 0 }; /* sleep_look_again */
            data_wait = data_wait + 2; /* sleep_greet_peer */
            wake_readers()
        :: else
        fi
    :: over && !stopped -> break
    od
}

/* ---- a reader --------------------------------------------------------------------------------------------------------- */

inline take_seat() {
    atomic { /* the lock; state is this reader's from here on */
        if
        :: !locked[0] -> seat = 0
        :: !locked[SEATS - 1] -> seat = SEATS - 1
        fi;
        locked[seat] = 1;
        locks[me] = seat + 1
    };
    state[seat] = state[seat] & ~3; /* pairs: SEAT */
    atomic { life[seat] = TID + me; holds[me] = seat + 1 };
    wake_life(seat);
    turn = turn_of(state[seat]) + 1;
    tail[seat] = head;
    state[seat] = (turn << 2) | JOINING; /* pairs: SEAT */
    position = head; /* pairs: SEAT */
    tail[seat] = position;
    state[seat] = (turn << 2) | TAKEN;
    space_wait = space_wait + 2; /* sleep_greet_peer */
    writer_asleep = 0;
    seen = position
}

inline leave_seat() {
    atomic { life[seat] = RELEASED; holds[me] = 0; wake_life(seat) }; /* one system call */
    atomic { locked[seat] = 0; locks[me] = 0 }
}

inline pass_on_death() {
    if
    :: writer_life == DEAD -> wake_readers() /* pairs: DEAD */
    :: else
    fi
}

inline read_one() {
    do
    :: seen > position -> break
    :: seen == position ->
        seen_life = writer_life; /* pairs: DEAD */
        d_step { data_wait = data_wait | 1; announced = data_wait }; /* pairs: SLEEP */
        seen = head; /* pairs: VISIBLE, SLEEP */
        is_out = verdict[seat] == turn; /* pairs: OUT */
        if
        :: is_out -> break
        :: !is_out && seen == position && (seen_life == DEAD || seen_life == RELEASED) -> is_told = 1; break
        :: !is_out && seen == position && seen_life == TID ->
            reader_asleep[me] = (data_wait == announced && writer_life == seen_life);
            !reader_asleep[me];
            pass_on_death()
        :: !is_out && seen > position
        fi
    od;
    atomic { announced = 0; seen_life = 0 };
    if
    :: is_out || is_told
    :: else ->
        if
        :: n = 1
        :: MOST_READ > 1 && seen - position > 1 -> n = seen - position
        fi;
        do
        :: i < n ->
            d_step { was_whole = was_whole && ring[(position + i) % CAPACITY] == position + i + 1; i++ }
        :: else -> break
        od;
        is_out = verdict[seat] == turn; /* pairs: OUT */
        if
        :: is_out
        :: else ->
            assert(was_whole && seen - position <= CAPACITY);
            d_step { position = position + n; tail[seat] = position }; /* pairs: VISIBLE, SLEEP */
            if
            :: space_wait & 1 -> /* pairs: SLEEP */
                if
                :: position - n < need && position >= need -> /* its own move came past it */
                    space_wait++;
                    writer_asleep = 0
                :: else
                fi
            :: else
            fi
        fi
    fi;
    atomic { n = 0; i = 0; was_whole = 1 }
}

proctype reader(byte me) {
    byte seat, turn, position, seen, n, i, seen_life, announced;
    bit is_out, is_told, was_whole = 1;
    {
        do
        :: atomic { joins > 0 && !is_told -> joins-- };
            take_seat();
            do
            :: is_out || is_told -> break
            :: !is_out && !is_told -> read_one()
            :: !is_out && !is_told -> break /* it leaves */
            :: atomic { EVICTIONS && !is_out && !is_told && !stopped && !over -> stopped = seat + 1 };
end_stopped:    false
            od;
            assert(!is_told || position == head);
            leave_seat();
            atomic { is_out = 0; seat = 0; turn = 0; position = 0; seen = 0 }
        :: joins == 0 || is_told -> break
        od
    } unless { killed[me] }
}

/* ---- the kernel --------------------------------------------------------------------------------------------------------- */

proctype kernel() {
    byte who;
    do
    :: deaths > 0 ->
        atomic {
            if
            :: who = 0
            :: who = READERS - 1
            fi;
            deaths--;
            killed[who] = 1
        };
        atomic { /* the robust list, and the one sleeper of that word */
            if
            :: holds[who] -> life[holds[who] - 1] = DEAD; wake_life(holds[who] - 1); holds[who] = 0
            :: else
            fi
        };
        atomic {
            if
            :: locks[who] -> locked[locks[who] - 1] = 0; locks[who] = 0
            :: else
            fi;
            reader_asleep[who] = 0; who = 0
        }
    :: deaths == 0 -> break
    od
}

proctype killer_of_the_writer() {
    if
    :: atomic { !over -> writer_killed = 1 };
        atomic {
            writer_life = DEAD;
            if /* the kernel wakes one sleeper of the life word, whichever */
            :: reader_asleep[0] -> reader_asleep[0] = 0
            :: reader_asleep[READERS - 1] -> reader_asleep[READERS - 1] = 0
            :: !reader_asleep[0] && !reader_asleep[READERS - 1]
            fi
        }
    :: true
    fi
}

init {
    atomic {
        select(deaths : 0 .. DEATHS); /* a sleep that nothing but a death could end is a lost wake-up */
        joins = JOINS;
        evictions = EVICTIONS;
        run writer();
        run reader(0);
        if
        :: READERS > 1 -> run reader(READERS - 1)
        :: READERS == 1
        fi;
        if
        :: deaths > 0 -> run kernel()
        :: deaths == 0
        fi;
        if
        :: EVICTIONS -> run owner()
        :: !EVICTIONS
        fi;
        if
        :: WRITER_DIES -> run killer_of_the_writer()
        :: !WRITER_DIES
        fi
    }
}
