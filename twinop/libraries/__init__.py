"""Libraries of ops: what a file holds, where it lies, and ops that Python declares."""
