"""What runs inside an observed process."""
