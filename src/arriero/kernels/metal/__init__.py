"""Kernels for Apple GPUs: `.metal` files, compiled at run time by `mx.fast.metal_kernel`.

`source` reads the files, `gpu` says whether they are to be used, and one file for each operation knows its launch. What
an operation does not take here, its graph version computes. Refuses to know models.

None of this has run on a Mac yet: every file is executed on the CPU by the tests, with its accesses to memory checked,
and is used only where `ARRIERO_METAL_KERNELS=1` asks for it (docs/metal.md).
"""
