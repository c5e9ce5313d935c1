"""`twinop pack`: packs a model and its library as a Triton repository, an image and KServe manifests.

The files are made from templates/ and from what the model and the library describe.
"""
