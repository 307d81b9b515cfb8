"""What decisions do, as spans and counters, for OpenTelemetry."""
