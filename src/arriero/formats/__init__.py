"""Bytes ⇄ numbers: file headers and number formats, with a scalar reference for each. Refuses to know models."""
