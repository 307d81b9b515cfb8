"""Other sources of a kernel: what they are, where they come from, and for what they were verified."""

from forecast_autotune.variants.records import Check, Origin, Provenance, Variant
from forecast_autotune.variants.signature import admission, admitted, covers, signature_of

__all__ = ["Check", "Origin", "Provenance", "Variant", "admission", "admitted", "covers", "signature_of"]
