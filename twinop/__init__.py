"""twinop: one kernel, two runtimes. Write an op once; run it in PyTorch and in ONNX Runtime.

The parts are `twinop.torch_op`, `twinop.export`, `twinop.deploy` and `twinop.bench`. This module imports
none of them, so that serving a model needs neither torch nor the exporters.
"""

__version__ = "0.2.0"
