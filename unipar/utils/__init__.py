"""Small helpers that know nothing of training. May import `errors.py` only. No torch, but in `seeding.py`."""
