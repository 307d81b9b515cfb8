"""Language models behind a server: requests, limits, and what their replies say."""
