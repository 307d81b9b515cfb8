"""Chunked linear recurrences: programs i_k, i_v, i_t, i_bh, tiles BT x BK x BV, many small dots."""
