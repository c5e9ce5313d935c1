"""Kernels that are compiled ahead of time: when a library launches which, as data and as C++."""
