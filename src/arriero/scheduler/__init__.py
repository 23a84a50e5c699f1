"""Which models are loaded: leases, keep-alive, the memory ledger, runner processes.

Refuses to know chat formats, architectures and MLX.
"""

from arriero.scheduler.lease import Generation, Lease, LoadedModel, LoadRequest
from arriero.scheduler.runner import error_of
from arriero.scheduler.scheduler import Scheduler

__all__ = ["Generation", "Lease", "LoadRequest", "LoadedModel", "Scheduler", "error_of"]
