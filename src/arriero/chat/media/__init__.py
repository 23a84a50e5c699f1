"""Images → sized patches and the number of placeholder tokens, one file for each family of models."""
