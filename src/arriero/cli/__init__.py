"""What a person types. Talks to the server by HTTP; refuses to know models and MLX.

Of the store only `create --dry-run` and `bench --quality` know, which work without a server.
"""
