"""Kernels in Triton's language: from the user's launcher to compiled kernels and their launches."""
