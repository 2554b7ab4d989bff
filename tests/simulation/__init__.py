"""A model of the commit protocol that is searched: workers on several machines over one simulated file system.

`drawing` draws from a seed who works on what and which troubles come: processes killed at any step, machines that
crash and lose what was not synced, pauses and stalled threads of any length, processes replaced while they are only
paused, signals, a full disk, errors before a call is done and replies lost after it, listings and absent names that
another machine remembers. In a share of the schedules somebody appends plans meanwhile (`appends`). `schedule` runs
all of it, `world` lets one step happen at a time, `storage` knows what is left after a crash, `promises` says what must
hold, `plants` and `append_plants` break the product on purpose. `doubles` says which code is the product's own.

    python -m tests.simulation --schedules 100000 --processes 2     search
    python -m tests.simulation --replay 4711                        every step of one schedule
    python -m tests.simulation --plants                             how soon each planted fault is found

`--record` writes what was searched, and the seed that found each planted fault, to `searches.json`. Faults that a
search found in the product are there by the name of the plant that brings them back, with the seed that first showed
each: a seed's steps move whenever the product's do, so that only the plant's own seed replays it now.
"""
