"""FlagGems' tuned operators, planned and timed through us. See `policy.enable_flaggems`."""
