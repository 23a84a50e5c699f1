"""Go's template language, as far as chat templates use it: text → tree → prompt."""
