"""One file per draft model. Refuses to know the engine."""
