"""Operations that plain MLX does badly: one file per operation, with the graph version and the choice of device version. Refuses to know models."""
