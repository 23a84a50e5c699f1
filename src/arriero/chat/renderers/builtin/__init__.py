"""The built-in renderers: templates of our own for families whose models may come without one."""
