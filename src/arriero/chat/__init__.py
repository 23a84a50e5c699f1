"""Conversation ⇄ text ⇄ token ids. Refuses to know HTTP and MLX."""
