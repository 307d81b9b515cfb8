"""Bundles: read-only folders of measurements and decisions, made on one machine and used on others."""
