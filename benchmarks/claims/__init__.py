"""The manifest of measured claims: what it says, whether README and docs agree with it, and what is out of date."""
