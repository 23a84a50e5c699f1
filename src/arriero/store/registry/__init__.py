"""Models over the network: pull and push of Ollama's registry protocol, and repositories of Hugging Face's hub.

Blocking, for threads. What a registry says is checked before it touches the disk. Refuses to know the HTTP server.
"""
