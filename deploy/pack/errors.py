"""What keeps a model from being packed, beside what is wrong with the model or the library itself."""

from twinop.errors import TwinopError


class PackError(TwinopError):
    """An option does not fit, something is missing for the image, or the folder is not ours to overwrite."""
