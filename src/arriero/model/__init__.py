"""The contract, the opened checkpoint, layers built from it. Refuses to know HTTP, text and sampling."""
