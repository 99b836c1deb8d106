"""Compiled kernels: LLVM vectors through numba, for x86 and ARM. Arrays in, arrays out."""
