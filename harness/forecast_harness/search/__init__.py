"""Offline, evolutionary, surrogate-filtered search for faster kernels.

`events` are the nouns. `state.replay_events` of a log's events is all that a search knows; `plan.pending_actions` of
that state is all that it does next; `run` carries it out.
"""
