"""Patch one function's source at exact spans and compile it back into a function that tools accept."""
