"""The serving report: servers, models, and the clients that load them."""
