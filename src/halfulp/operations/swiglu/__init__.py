"""SwiGLU, as data."""
