"""Measurements: speed, memory, quality, as tables."""
