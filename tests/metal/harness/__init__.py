"""Runs Metal kernels on the CPU: their text is compiled as C++, and every access to memory is checked."""
