"""Code that runs inside an observed process."""
