"""The engine process: token ids in, token ids out. Refuses to know text, HTTP and files other than the checkpoint."""
