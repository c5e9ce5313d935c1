"""`twinop pack`: packs a model and its libraries as a repository of models, for `twinop serve` or Triton."""
