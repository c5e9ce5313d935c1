"""ONNX models without torch: what exports and the optimizer share.

`bodies.py` has the function bodies of twinop's ops, which `record_body.py` traces and `attach.py` puts into
models. `calls.py` reads the ops' nodes. `folding.py` folds constants without a change of values. `weights.py`
has weights that stay in their files, and what is computed from them. `files.py` writes a model.
"""
