"""Building blocks of architectures; the only code that looks at the spans of a batch."""
