"""Search for the schedules that are fastest on a machine; `scripts/tune.py` is its command."""
