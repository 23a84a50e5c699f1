"""CUDA kernels executed on the CPU: compiled as C++, every thread a fiber, so that they can be tested without a GPU."""
