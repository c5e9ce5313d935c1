"""The inference service of `twinop serve`: REST and gRPC servers around twinop's sessions."""
