"""Which models are loaded: leases, keep-alive, the memory ledger, runner processes. Refuses to know chat formats and architectures."""
