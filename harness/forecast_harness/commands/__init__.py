"""Commands of the harness: `verify`, `bench`, `variants`, `search`."""
