"""The list of architectures, and one file for each."""
