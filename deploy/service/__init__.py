"""The inference service: KServe's server around twinop's sessions. `twinop serve` starts it."""
