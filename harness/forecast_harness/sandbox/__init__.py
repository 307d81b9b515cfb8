"""Run code that may be wrong, hostile or lucky, and say whose fault it was.

Processes, from trusted to not: the *lane* (the caller's process; sends text, gets bytes), its *server*
(forks everything, warm, no device, sees no payload), a *judge* per job (trusted code; holds inputs, expected
values, the clock and the only way to the lane), and *cells*, in which candidates run. A cell is forked from
the server and not from the judge, so nothing the judge knows was ever in its memory; it holds one socket, on
which whatever it says is data to be judged. `api` has what users need, `levels` what each level contains.
"""
