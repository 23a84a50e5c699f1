"""Streamed text → thinking, content and tool-call events; a parser never raises."""
