"""What is on disk: names, manifests, blobs. Refuses to know MLX and the HTTP server."""
