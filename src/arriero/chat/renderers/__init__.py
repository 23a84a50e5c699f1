"""Conversation → prompt segments."""
