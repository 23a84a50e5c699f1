"""arriero runs large language models on a person's own machine, on MLX.

This package module refuses to know anything: importing it loads neither MLX nor a web server.
"""

__version__ = "0.1.0"

OLLAMA_VERSION = "0.32.15"
"""The version of Ollama's API that we speak; clients gate features on it (`GET /api/version`)."""
