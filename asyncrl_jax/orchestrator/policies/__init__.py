"""Pure decisions, one to a file: `decide(state, observed, config)` returns the next state and what to do.

Frozen in, frozen out: nothing here reads a clock, draws at random or touches Redis, so the loop and the simulator run
the same rules. `now` is in seconds of any clock; one that jumps back counts as one that stands still. Every change of
mind is a `Decision` with the numbers that caused it. Admission alone needs no state.
"""
