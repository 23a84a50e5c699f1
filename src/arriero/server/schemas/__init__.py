"""Wire types, one file per API."""
