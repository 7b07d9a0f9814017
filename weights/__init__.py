"""Small checkpoints and the built-in reviews, which this project made itself, and the recipes that made them."""
