"""Offline, evolutionary, surrogate-filtered search for faster kernels.

`records` and `events` are the nouns, `interfaces` the plug-in points. `state.replay_events` of a log's events is all
that a search knows; `decide.pending` of that state is all that it does next; `run` carries it out.
"""
