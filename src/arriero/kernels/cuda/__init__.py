"""Kernels for NVIDIA GPUs: `.cu` files, compiled at run time by `mx.fast.cuda_kernel`.

`gpu` finds the device and tries it once, `source` makes kernels of files, and one file for each operation chooses a
kernel's geometry. What an operation does not take here, its graph version computes. Refuses to know models.
"""
