"""From logits to token ids. Refuses to know models and rows."""
