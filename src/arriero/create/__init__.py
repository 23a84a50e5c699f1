"""Import of models into the store: inventory → plan → check → quantize → write. Refuses to know the running engine."""
