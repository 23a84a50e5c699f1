"""Drafting and exact verification."""
