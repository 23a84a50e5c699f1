"""Reuse of computed prefixes across rows."""
