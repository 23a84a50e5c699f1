"""Import of models into the store: inventory → plan → transform → quantize → write. Refuses to know the running engine."""
