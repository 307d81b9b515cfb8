"""Replay the tuner against recorded measurements: what would it have measured, chosen and missed?

A replay needs no GPU. `forecast-autotune replay FILE` prints the same for a whole file of tables.

Output (numbers may differ):

    _layer_norm_fwd_fused: 80 candidates, best 0.07994 ms, worst 1.038 ms, 0 failed
    accepted risk 10%: 13 measured, chose one 0.5% slower than the best
    accepted risk 50%: 3 measured, chose one 1.5% slower than the best
"""

from forecast_autotune import (
    AnalyticSurrogate,
    RiskBounded,
    Settings,
    Table,
    read_tables,
    replay,
    shipped_tables,
)


def describe(table: Table) -> str:
    """One line about a table."""
    rows = table.by_candidate().values()
    times = sorted(row.ms for row in rows if row.ok)
    return (
        f"{table.problem.kernel.name}: {len(rows)} candidates, best {times[0]:.4g} ms, "
        f"worst {times[-1]:.4g} ms, {len(rows) - len(times)} failed"
    )


table = read_tables(shipped_tables()[0])[0]
print(describe(table))
for risk in (0.10, 0.50):
    report = replay(
        [table],
        surrogate=AnalyticSurrogate(),  # not fitted to anything, so it has not seen this table
        policy=lambda table: RiskBounded(),
        settings=Settings(risk=risk),
    )
    (row,) = report.rows
    print(
        f"accepted risk {risk:.0%}: {row.measured} measured, chose one {row.regret:.1%} slower than the best"
    )
