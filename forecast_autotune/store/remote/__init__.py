"""A store that machines share: Redis, or whatever fsspec has an address for."""
