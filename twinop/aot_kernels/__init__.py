"""Device modules: compiled kernels with a plan of how they are launched, carried by a library as data."""
