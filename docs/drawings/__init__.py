"""The drawings of the documentation, as code. `python docs/draw.py` writes them to docs/pictures/."""
