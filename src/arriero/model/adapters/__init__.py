"""Architectures that others implement, behind our contract.

Refuses to know the engine. Nothing here is imported before a configuration names an architecture that is not ours.
"""
