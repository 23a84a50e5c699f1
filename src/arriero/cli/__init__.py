"""What a person types. Talks to the server by HTTP only; refuses to know models, MLX and the store."""
