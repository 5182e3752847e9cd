"""Counter-based random numbers: in bulk on the CPU, and by CUDA kernels."""
