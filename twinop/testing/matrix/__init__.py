"""The tests of `twinop test`. Each is run for every op, dtype combination and device (`..plugin`)."""
