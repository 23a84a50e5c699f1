"""The HTTP surface. Refuses to know tensors."""
