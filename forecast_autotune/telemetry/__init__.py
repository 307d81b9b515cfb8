"""The steps of decisions as spans and counters, for OpenTelemetry."""
