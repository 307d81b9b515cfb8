"""The configs of a source that are worth their time: its list, forecasts of it, the launches that verify it."""
