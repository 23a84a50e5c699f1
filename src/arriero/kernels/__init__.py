"""Operations that plain MLX does badly: one file per operation.

Each holds the graph version (plain MLX, always right) and the choice of the device's version: the extension's on the
CPU, `cuda` on NVIDIA GPUs, `metal` on Apple's. Refuses to know models.
"""
