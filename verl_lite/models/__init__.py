"""Models as trained here: loading, the forward pass to log-probs and values, attention over packed rows."""
