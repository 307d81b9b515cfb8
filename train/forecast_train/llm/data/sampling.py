"""Which candidates to ask for: even over the bins, and within a bin even over the problems.

Most configs of a space are slow, most problems of a corpus belong to few kernels: a plain sample teaches
a model those. The scheme follows the reference implementation of arXiv 2605.31464 (`balanced_pair_sampling`),
without its quadratic table of pairs.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Index = npt.NDArray[np.intp]


def even_counts(available: Sequence[int], target: int) -> list[int]:
    """How many to take from each group so that together they are `target`, as evenly as they can be.

    No group gives more than it has; where all together have less, all give everything. What does not divide
    goes to the first groups that still have some.
    """
    if target < 0 or min(available, default=0) < 0:
        raise ValueError(f"counts cannot be negative: {target} of {list(available)}")
    taken = [0] * len(available)
    left = min(target, sum(available))
    while left:
        open_groups = [i for i, (have, t) in enumerate(zip(available, taken, strict=True)) if have > t]
        share = max(1, left // len(open_groups))
        for i in open_groups:
            step = min(share, available[i] - taken[i], left)
            taken[i] += step
            left -= step
    return taken


def balanced_rows(
    bins: Sequence[Index], per_bin: int, labels: int, generator: np.random.Generator
) -> list[Index]:
    """Rows to keep of each group, sorted; `bins[g]` holds the label of each row of group g.

    Each of the `labels` gets at most `per_bin` rows over all groups, shared by `even_counts`. Which groups
    get the indivisible rest, and which rows of a group are kept, is drawn.
    """
    order = generator.permutation(len(bins))
    kept: list[list[int]] = [[] for _ in bins]
    for label in range(labels):
        rows = [np.flatnonzero(bins[g] == label) for g in order]
        for g, mine, count in zip(order, rows, even_counts([len(r) for r in rows], per_bin), strict=True):
            kept[g] += generator.permutation(mine)[:count].tolist()
    return [np.array(sorted(rows), dtype=np.intp) for rows in kept]
