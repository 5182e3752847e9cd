"""CUDA kernels of the runtime; empty until the GPU path comes."""
