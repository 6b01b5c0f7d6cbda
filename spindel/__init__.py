"""Durable structured concurrency for Trio.

General layout, from the top; imports point down only:

- `spindel.testing`: what a user's own tests need.
- `spindel.cli`: the command `spindel`.
- `spindel.operator`: what only somebody with authority over a room may do.
- `spindel.runs`: rooms, Runs, families, the worker pool. Most programs need nothing else.
- `spindel.store`: durable facts, and what keeps them.
- `spindel.observe`: what happened, as events.
- `spindel.errors`: every error, by who must act.
- `spindel.clock`, `spindel.codec`, `spindel.ids`, `spindel.process`: time, portable values, identities.

This module imports none of them, so that the command line answers `--help` without waiting for Trio.
"""
