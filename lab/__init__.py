"""The lab: other methods, other models, training, exits for a model that you have, and the command mini-ee."""
