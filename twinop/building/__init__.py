"""Ops of your own, outside twinop's tree: `twinop build`, `twinop new` and `twinop.compile`.

They need a C++ compiler and, for CUDA kernels, nvcc; neither CMake nor Ninja. The flags are those of twinop's
own libraries. Object files are kept in the cache (`~/.cache/twinop`, or $TWINOP_CACHE).
"""
