"""The Modelfile grammar, both ways. Refuses to know everything else."""
