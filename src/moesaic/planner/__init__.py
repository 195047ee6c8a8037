"""What to deploy: does it fit, how fast, and studies of what happens then. No torch."""
