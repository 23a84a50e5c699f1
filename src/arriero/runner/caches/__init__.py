"""One file per cache kind; all answer `model.contract.Cache`.

Refuses to know the engine, models and sampling.
"""
