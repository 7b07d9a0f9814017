"""Small checkpoints that this project trained itself, and the recipes that made them."""
