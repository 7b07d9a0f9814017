"""Small checkpoints trained by this project, the built-in reviews, and the scripts that made them."""
