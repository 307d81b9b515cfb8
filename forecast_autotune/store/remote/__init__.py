"""A store that machines share: Redis, or a file system of fsspec."""
