"""A guided tour of TileLang on the kernels of the model; `scripts/tour.py` is its command."""
