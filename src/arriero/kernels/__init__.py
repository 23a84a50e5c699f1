"""Operations that plain MLX does badly: one file per operation.

Each holds the graph version (plain MLX, always right) and the choice of the device's version. Refuses to know models.
"""
