"""`twinop pack`: a model and its library as a Triton repository, an image and KServe manifests.

The files are templates in templates/, filled in from what the model and the library say of themselves.
"""
