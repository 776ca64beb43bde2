"""GeGLU, as data."""
