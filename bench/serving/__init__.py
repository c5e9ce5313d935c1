"""The reports on the inference service: `serve` compares it with others, `soak` tests it under load."""
