"""Measurements for `arriero bench`: speed, what quantising cost, kernels of a GPU. Refuses to know models' insides."""
