"""Ops of your own, outside twinop's tree: `twinop build`, `twinop new` and `twinop.compile`.

They need a C++ compiler, CMake and ninja (`twinop[build]`) and, for CUDA kernels, nvcc. twinop's CMake
package (cmake/) builds them as it builds twinop's own.
"""
