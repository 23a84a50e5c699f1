"""One file per cache kind; all answer `model.contract.Cache`.

Refuses to know the engine, models and sampling.
"""

from arriero.runner.caches.full import KVCache
from arriero.runner.caches.sliding import SlidingCache
from arriero.runner.caches.snapshot import RangeSnapshot, StateSnapshot
from arriero.runner.caches.state import NGramCache, RecurrentCache, WholeState

__all__ = ["KVCache", "NGramCache", "RangeSnapshot", "RecurrentCache", "SlidingCache", "StateSnapshot", "WholeState"]
