"""What decisions do, as spans and counters, for whoever asked to see them: OpenTelemetry, or a trace file."""
