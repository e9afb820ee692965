"""Small helpers that do not depend on training. They import `unipar.errors` only; `seeding.py` alone imports torch."""
