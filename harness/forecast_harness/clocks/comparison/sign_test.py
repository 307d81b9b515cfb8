"""A test that may be looked at after every block: an e-process on the signs of paired differences.

If the candidate is not faster, a block's log-ratio is positive with probability at most 1/2 whatever came
before: the order within each block is drawn by a fair coin, so drift and neighbours favour nobody. A bettor
against that starts with 1 and stakes a share of the capital on "positive"; the capital is a non-negative
supermartingale, and by Ville's inequality it ever reaches 1/alpha with probability at most alpha, however
often one looks and whenever one stops (Ville 1939; Ramdas et al., Game-theoretic statistics and safe
anytime-valid inference, Statistical Science 2023).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

_BET_LOG_FACTORS = tuple((math.log(1 + 0.1 * n), math.log(1 - 0.1 * n)) for n in range(1, 10))
"""What the capital is multiplied by (as logarithms) on a win and on a loss, for bettors that believe in
probabilities of 0.55, 0.6, ..., 0.95; each manages an equal share of the starting capital."""


@dataclass
class SignTest:
    """Evidence that differences exceed `margin` more often than not."""

    margin: float = 0.0
    wins: int = 0
    losses: int = 0

    def add(self, difference: float) -> None:
        """Take one block's difference; one equal to the margin is no evidence for anybody."""
        if difference > self.margin:
            self.wins += 1
        elif difference < self.margin:
            self.losses += 1

    @property
    def log_evidence(self) -> float:
        """Natural logarithm of the bettor's capital, 0 at the start."""
        logs = [self.wins * win + self.losses * loss for win, loss in _BET_LOG_FACTORS]
        top = max(logs)
        return top + math.log(sum(math.exp(v - top) for v in logs) / len(logs))

    def reached(self, alpha: float) -> bool:
        """Whether the evidence refutes "not more often than not" at level `alpha`, now.

        To be asked after every block: `alpha` bounds the probability that it is ever wrongly true.
        """
        return self.log_evidence >= -math.log(alpha)
