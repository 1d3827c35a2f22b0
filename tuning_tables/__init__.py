"""Measured times, one YAML file per device."""
