"""Weights: which checkpoint tensor goes where, what the files hold, and the loading itself."""
