"""Kernels in Triton's language: from the launcher that the user wrote to compiled kernels and their launches."""
