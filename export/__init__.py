"""An exported folder, and how to deploy it: README.md and the clients."""
