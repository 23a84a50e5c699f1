"""The interactive conversation of `arriero run`."""
