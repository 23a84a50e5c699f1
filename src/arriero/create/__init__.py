"""Import of models into the store: inventory → plan → write. Refuses to know the running engine."""
