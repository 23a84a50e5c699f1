"""Calls that must fit their schemas: the grammars of how each family writes them."""
