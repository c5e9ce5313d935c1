"""ONNX models without torch: what exports and the optimizer share.

`bodies.py` has the function bodies of twinop's ops, which `record_body.py` traces and `attach.py` puts into
models. `calls.py` reads the ops' nodes. `folding.py` folds constants without a change of values. `files.py`
writes a model.
"""
